"""What a formatted and a packed set say of themselves, and whether they fit what reads them.

Contract: `FormattedFacts` and `PackedFacts` are what `format` and `pack` write into their manifests;
`read_*` returns them, or DataError for a folder that is missing, unfinished, or made for another tokenizer; `read_packed_of` also
for one made from another formatted set, whether its template or its rows differ.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.artifact import digest_file, read_manifest
from pipeline.config.errors import DataError

SPLITS = ("train", "validation")

IGNORED = -100
"""Label of a token that is not trained on (torch's `ignore_index`)."""


@dataclass(frozen=True)
class FormattedFacts:
    """Manifest of data/formatted. Rows are in `SPLIT.arrow` (`preparing.SCHEMA`). parts_digest: of what the rows say, and not of
    where they stood, so that a renamed raw file makes no other packed set."""

    template: str
    template_digest: str
    stop_token: str
    tokenizer_digest: str
    parts_digest: str
    train_rows: int
    validation_rows: int


@dataclass(frozen=True)
class PackedFacts:
    """Manifest of data/packed. Rows are in `packed_files`: input_ids, labels, seq_lengths, documents (row numbers in the
    formatted set), first_parts (the part with which each document begins; 0 unless its row was split)."""

    template: str
    template_digest: str
    stop_token: str
    stop_token_id: int
    tokenizer_digest: str
    parts_digest: str
    max_length: int
    train_sequences: int
    train_tokens: int
    train_fill: float
    validation_sequences: int
    documents_dropped: int
    tokens_truncated: int
    tokens_dropped: int


def shard_name(split: str, number: int) -> str:
    """File name of a shard of a packed split."""
    return f"{split}-{number:05}.arrow"


def packed_files(folder: Path, split: str) -> list[str]:
    """The shards of a packed split in order; DataError if there is none."""
    found = sorted(str(path) for path in folder.glob(f"{split}-*.arrow"))
    if not found:
        raise DataError(f"{folder}: no {shard_name(split, 0)}; an earlier version made it, or a file is gone: `dvc repro pack`")
    return found


def tokenizer_digest(model: Path) -> str:
    """SHA-256 of the tokenizer file of a base model."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: the base model has no tokenizer.json; `dvc repro base` makes it")
    return digest_file(path)


def read_formatted(folder: Path, model: Path) -> FormattedFacts:
    """Facts of a formatted set that was made for the tokenizer of `model`."""
    return _read(folder, model, FormattedFacts, "format")


def read_packed(folder: Path, model: Path) -> PackedFacts:
    """Facts of a packed set that was made for the tokenizer of `model`."""
    return _read(folder, model, PackedFacts, "pack")


def read_packed_of(folder: Path, formatted: Path, model: Path) -> PackedFacts:
    """As `read_packed`, of a set that was made from this formatted set: the row numbers in it mean these rows."""
    found, source = read_packed(folder, model), read_formatted(formatted, model)
    pairs = {"template": (found.template_digest, source.template_digest), "content": (found.parts_digest, source.parts_digest)}
    for what, (mine, theirs) in pairs.items():
        if mine != theirs:
            raise DataError(
                f"{folder}: made from another formatted set: its {what} was {mine[:12]}, that of {formatted} is {theirs[:12]}; "
                "run `dvc repro pack`"
            )
    return found


Facts = TypeVar("Facts", FormattedFacts, PackedFacts)


def _read(folder: Path, model: Path, facts: type[Facts], stage: str) -> Facts:
    manifest: dict[str, Any] = read_manifest(folder, f"the {folder.name} set")
    absent = [field.name for field in dataclasses.fields(facts) if field.name not in manifest]
    if absent:
        raise DataError(f"{folder}: its manifest lacks '{absent[0]}', so an earlier version made it; run `dvc repro {stage}`")
    found = facts(**{field.name: manifest[field.name] for field in dataclasses.fields(facts)})
    wanted = tokenizer_digest(model)
    if found.tokenizer_digest != wanted:
        raise DataError(
            f"{folder}: made for tokenizer {found.tokenizer_digest[:12]}, but the base model's is {wanted[:12]}; "
            f"run `dvc repro {stage}`"
        )
    return found
