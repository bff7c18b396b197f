"""What formatted and packed sets say of themselves.

Would catch: data made for another tokenizer taken for this one's, an unfinished folder taken for a finished one, an
error that does not say which stage to run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.artifact import digest_file, publish
from pipeline.config.errors import DataError
from pipeline.dataset.manifest import (
    FormattedFacts,
    PackedFacts,
    packed_files,
    read_formatted,
    read_packed,
    read_packed_of,
    shard_name,
    tokenizer_digest,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _formatted(digest: str) -> FormattedFacts:
    return FormattedFacts("chat", "d" * 64, "<|end|>", digest, "e" * 64, 9, 1)


def _packed(digest: str) -> PackedFacts:
    return PackedFacts("chat", "d" * 64, "<|end|>", 4, digest, "e" * 64, 128, 5, 600, 0.9375, 1, 0, 0, 0)


def _published(folder: Path, facts: FormattedFacts | PackedFacts) -> Path:
    with publish(folder, asdict(facts)) as inside:
        (inside / "train.arrow").write_text("rows")
    return folder


def test_facts_come_back(model: Path, tmp_path: Path) -> None:
    digest = tokenizer_digest(model)
    assert digest == digest_file(model / "tokenizer.json")
    assert read_formatted(_published(tmp_path / "formatted", _formatted(digest)), model) == _formatted(digest)
    assert read_packed(_published(tmp_path / "packed", _packed(digest)), model) == _packed(digest)


def test_shards_in_order(tmp_path: Path) -> None:
    names = [shard_name("train", number) for number in (11, 2, 0, 1)]
    for name in (*names, shard_name("validation", 0), "train.arrow"):
        (tmp_path / name).write_text("")
    assert [Path(p).name for p in packed_files(tmp_path, "train")] == [
        "train-00000.arrow",
        "train-00001.arrow",
        "train-00002.arrow",
        "train-00011.arrow",
    ]
    with pytest.raises(DataError, match=r"no test-00000\.arrow.*dvc repro pack"):
        packed_files(tmp_path, "test")


def test_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    digest = tokenizer_digest(model)
    formatted = _published(tmp_path / "formatted", _formatted(digest))
    packed = _published(tmp_path / "packed", _packed(digest))
    (model / "tokenizer.json").write_text('{"changed": true}')
    with pytest.raises(DataError, match=f"made for tokenizer {digest[:12]}, but .* run `dvc repro format`"):
        read_formatted(formatted, model)
    with pytest.raises(DataError, match=f"made for tokenizer {digest[:12]}, but .* run `dvc repro pack`"):
        read_packed(packed, model)


@pytest.mark.parametrize(("field", "what"), [("template_digest", "template"), ("parts_digest", "content")])
def test_a_packed_set_of_another_formatted_set_is_refused(field: str, what: str, model: Path, tmp_path: Path) -> None:
    digest = tokenizer_digest(model)
    formatted = _published(tmp_path / "formatted", _formatted(digest))
    packed = _published(tmp_path / "packed", _packed(digest))
    assert read_packed_of(packed, formatted, model) == _packed(digest)
    _published(formatted, replace(_formatted(digest), **{field: "0" * 64}))
    was = getattr(_packed(digest), field)[:12]
    with pytest.raises(
        DataError, match=f"packed: made from another formatted set: its {what} was {was}, .* is 000000000000; run"
    ):
        read_packed_of(packed, formatted, model)


def test_missing_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the packed set is missing; `dvc repro` makes it"):
        read_packed(tmp_path / "packed", model)


def test_a_folder_without_manifest_is_unfinished(model: Path, tmp_path: Path) -> None:
    folder = _published(tmp_path / "packed", _packed(tokenizer_digest(model)))
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="missing"):
        read_packed(folder, model)


@pytest.mark.parametrize("content", ["", '{"template": "chat"', "[]", "\x00"])
def test_broken_manifest(content: str, model: Path, tmp_path: Path) -> None:
    folder = _published(tmp_path / "packed", _packed(tokenizer_digest(model)))
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json: the packed set"):
        read_packed(folder, model)


def test_a_manifest_of_an_older_form(model: Path, tmp_path: Path) -> None:
    folder = _published(tmp_path / "packed", _packed(tokenizer_digest(model)))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stop_token_id"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"stop_token_id.*dvc repro pack"):
        read_packed(folder, model)


def test_base_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json; `dvc repro base` makes it"):
        tokenizer_digest(tmp_path)
