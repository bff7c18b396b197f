"""What the model is trained on, to be read: packed documents decoded, answers told from context.

Contract: reads files only (the packed set, the formatted one for where a row came from, the tokenizer), imports neither torch
nor transformers, changes nothing. Shares are over a whole split; samples are sequences spread evenly over it. The page is one
file that needs no network.

Command: ladder masks [N] [--split validation] [--html FILE]
"""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader
from rich.console import Console
from rich.text import Text
from ruamel.yaml import YAML
from tokenizers import Tokenizer

from pipeline.config.errors import ConfigError, DataError
from pipeline.dataset.manifest import PackedFacts, packed_files, read_packed_of
from pipeline.dataset.masking import IGNORED, load_tokenizer

BARS = 10
LEAST = 12
"""Documents with the smallest supervised share that are shown."""


@dataclass(frozen=True)
class Paths:
    """Where the sets are, as dvc.yaml says."""

    formatted: Path
    model: Path
    packed: Path


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one kind, decoded."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Document:
    """One document of a sequence. `supervised` counts tokens; the first is never predicted, so it does not count."""

    place: str
    tokens: int
    supervised: int
    pieces: tuple[Piece, ...]

    @property
    def share(self) -> float:
        return self.supervised / self.tokens


@dataclass(frozen=True)
class Sequence:
    number: int
    documents: tuple[Document, ...]

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)


@dataclass(frozen=True)
class Report:
    """A split of the packed set. bars: documents by supervised share, in tenths; least: those with the smallest shares."""

    split: str
    facts: PackedFacts
    sequences: int
    documents: int
    tokens: int
    supervised: int
    bars: tuple[int, ...]
    least: tuple[Document, ...]
    samples: tuple[Sequence, ...]


def paths_of(pipeline: Path) -> Paths:
    """The paths that the `pack` stage of a dvc.yaml is given."""
    if not pipeline.is_file():
        raise ConfigError(f"{pipeline}: no such file; run from the root of the repository")
    stages: dict[str, Any] = YAML(typ="safe", pure=True).load(pipeline.read_text(encoding="utf-8"))["stages"]
    words = shlex.split(stages["pack"]["cmd"])
    flags = {flag: Path(value) for flag, value in pairwise(words) if flag.startswith("--")}
    return Paths(flags["--formatted"], flags["--model"], flags["--packed"])


def read(paths: Paths, split: str, samples: int) -> Report:
    """Count a whole split and decode some of it."""
    facts = read_packed_of(paths.packed, paths.formatted, paths.model)
    tokenizer = load_tokenizer(paths.model).tokenizer
    places = _places(paths.formatted / f"{split}.arrow")
    shares: list[np.ndarray] = []
    least: list[tuple[float, int, int]] = []
    sequences = tokens = supervised = 0
    for batch in _batches(paths.packed, split):
        trained, lengths, owners = _counts(batch)
        share = trained / lengths
        lowest = np.argsort(share, kind="stable")[:LEAST]
        within = np.searchsorted(np.cumsum(np.bincount(owners, minlength=batch.num_rows)), lowest, side="right")
        first = np.concatenate([np.zeros(1, int), np.cumsum(np.bincount(owners, minlength=batch.num_rows))])
        found = [(float(share[d]), sequences + int(s), int(d - first[s])) for d, s in zip(lowest, within, strict=True)]
        least = heapq.nsmallest(LEAST, [*least, *found])
        shares.append(share)
        sequences += batch.num_rows
        tokens += int(lengths.sum())
        supervised += int(trained.sum())
    if not sequences:
        raise DataError(f"{paths.packed}: the {split} split holds no sequence; raise format.validation_share or add rows")
    shown = min(samples, sequences)
    chosen = [(2 * number + 1) * sequences // (2 * shown) for number in range(shown)]
    wanted = {*chosen, *(sequence for _, sequence, _ in least)}
    decoded = {n: _decoded(n, row, tokenizer, places) for n, row in _rows(paths.packed, split, wanted)}
    every = np.concatenate(shares)
    return Report(
        split=split,
        facts=facts,
        sequences=sequences,
        documents=len(every),
        tokens=tokens,
        supervised=supervised,
        bars=tuple(np.bincount(np.minimum((every * BARS).astype(int), BARS - 1), minlength=BARS).tolist()),
        least=tuple(decoded[sequence].documents[document] for _, sequence, document in least),
        samples=tuple(decoded[number] for number in chosen),
    )


def show(report: Report, console: Console) -> None:
    """The samples in the terminal: what is trained on bright, context dim, a line before each document."""
    share = report.supervised / report.tokens
    console.print(
        f"{report.split}: {report.sequences:,} sequences, {report.documents:,} documents, {report.tokens:,} tokens, "
        f"{share:.1%} supervised; template {report.facts.template}, stop token {report.facts.stop_token}",
        highlight=False,
        markup=False,
    )
    console.print(Text.assemble(("supervised", "bold green"), "  ", ("context", "dim")))
    for sequence in report.samples:
        console.rule(Text(f"sequence {sequence.number}: {sequence.tokens:,} of {report.facts.max_length:,} tokens"), style="blue")
        for document in sequence.documents:
            head = f"--- {document.place}: {document.supervised} of {document.tokens} tokens supervised ({document.share:.1%})"
            console.print(Text(head, style="cyan"))
            text = Text()
            for piece in document.pieces:
                text.append(_visible(piece.text), style="bold green" if piece.supervised else "dim")
            console.print(text, soft_wrap=True)


def page(report: Report) -> str:
    """The same as one HTML page, with the distribution of shares and the documents that have the least."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True)
    return environment.get_template("masks.html.jinja").render(report=report, most=max(report.bars))


def _visible(text: str) -> str:
    """Control characters as pictures, so that a text cannot steer the terminal that shows it."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if 126 < ord(c) < 160 else c for c in text)


def _batches(packed: Path, split: str) -> Iterator[Any]:
    for path in packed_files(packed, split):
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
            yield from stream


def _counts(batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each document of a batch: supervised tokens, tokens, and the row of the batch it stands in."""
    labels = batch.column("labels").flatten().to_numpy()
    per_row = batch.column("seq_lengths")
    lengths = per_row.flatten().to_numpy().astype(np.int64)
    owners = np.repeat(np.arange(batch.num_rows), np.diff(per_row.offsets.to_numpy()))
    starts = np.cumsum(lengths) - lengths
    trained = (labels != IGNORED).astype(np.int64)
    trained[starts] = 0
    return np.add.reduceat(trained, starts) if len(starts) else starts, lengths, owners


def _rows(packed: Path, split: str, numbers: set[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    at = 0
    for batch in _batches(packed, split):
        for number in sorted(n for n in numbers if at <= n < at + batch.num_rows):
            yield number, batch.slice(number - at, 1).to_pylist()[0]
        at += batch.num_rows


def _decoded(number: int, row: dict[str, Any], tokenizer: Tokenizer, places: Any) -> Sequence:
    documents: list[Document] = []
    start = 0
    for length, source in zip(row["seq_lengths"], row["documents"], strict=True):
        ids = row["input_ids"][start : start + length]
        trained = [label != IGNORED for label in row["labels"][start : start + length]]
        documents.append(Document(places[source].as_py(), length, sum(trained[1:]), _pieces(ids, trained, tokenizer)))
        start += length
    return Sequence(number, tuple(documents))


def _pieces(ids: list[int], trained: list[bool], tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Runs of one kind. Some decoders drop a space at the start, so a run is what decoding gains by it."""
    borders = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    pieces: list[Piece] = []
    before = ""
    for start, end in pairwise(borders):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        gained = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[start:end], skip_special_tokens=False)
        pieces.append(Piece(gained, trained[start]))
        before = text
    return tuple(pieces)


def _places(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: no such file; `dvc checkout` restores it, `dvc repro format` makes it")
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().column("place")
