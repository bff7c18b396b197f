"""Stage `pack`, run as dvc.yaml states it.

Would catch: tokens that are not accounted for, a long document cut or dropped in silence, a sequence without anything to
learn, boundaries that do not fit the ids, a set packed for another tokenizer, an earlier set lost to a failing run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer

from pipeline.dataset.manifest import packed_files
from pipeline.dataset.masking import load_tokenizer
from pipeline.gates.smoke_checks import mask_checks
from tests.workspace import Workspace, assert_refused, make_workspace, rows

pytestmark = pytest.mark.unit

SPLITS = ("train", "validation")
LONG = {"instruction": "Repeat:", "input": "abc " * 20, "output": "abc " * 200}
ENDLESS = {"instruction": "Count words:", "input": "xyz " * 300, "output": "300"}


@pytest.fixture(scope="module")
def packed(made_base: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A project in which `format` and `pack` have run; two documents are too long. Read only."""
    workspace = make_workspace(tmp_path_factory.mktemp("packed") / "project", [*rows(60), LONG, ENDLESS])
    shutil.copytree(made_base.root / "models", workspace.root / "models")
    workspace.edit({"pack": {"long_documents": "drop"}})
    for stage in ("format", "pack"):
        result = workspace.run(stage)
        assert (result.code, result.stderr) == (0, "")
    return workspace


@pytest.fixture
def again(packed: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(packed.root, tmp_path / "project")
    return Workspace(tmp_path / "project")


def _sequences(workspace: Workspace, split: str) -> list[dict[str, Any]]:
    paths = packed_files(workspace.root / "data/packed", split)
    return [row for path in paths for row in datasets.Dataset.from_file(path)]  # pyright: ignore[reportReturnType]


def _formatted(workspace: Workspace, split: str) -> list[list[str]]:
    return datasets.Dataset.from_file(str(workspace.root / f"data/formatted/{split}.arrow"))["parts"][:]


def _documents(sequence: dict[str, Any]) -> list[tuple[int, list[int], list[int]]]:
    """Row number, ids and labels of each document of a sequence."""
    found: list[tuple[int, list[int], list[int]]] = []
    start = 0
    for row, length in zip(sequence["documents"], sequence["seq_lengths"], strict=True):
        found.append((row, sequence["input_ids"][start : start + length], sequence["labels"][start : start + length]))
        start += length
    assert start == len(sequence["input_ids"]) == len(sequence["labels"])
    return found


def _tokens(workspace: Workspace) -> dict[str, int]:
    metrics = workspace.metrics("pack")
    assert metrics["tokens_in"] == metrics["tokens_kept"] + metrics["tokens_truncated"] + metrics["tokens_dropped"]
    kept = sum(len(s["input_ids"]) for split in SPLITS for s in _sequences(workspace, split))
    assert metrics["tokens_kept"] == kept
    return metrics


def test_accounting_adds_up(packed: Workspace) -> None:
    metrics = _tokens(packed)
    assert (metrics["documents"], metrics["documents_dropped"], metrics["tokens_truncated"]) == (62, 2, 0)
    train = _sequences(packed, "train")
    assert metrics["sequences"] == len(train)
    assert metrics["validation_sequences"] == len(_sequences(packed, "validation"))
    kept = sum(len(s["input_ids"]) for s in train)
    assert metrics["fill"] == pytest.approx(kept / (len(train) * 128), abs=1e-4)
    assert metrics["supervised_tokens"] == sum(label != -100 for s in train for label in s["labels"])
    assert metrics["supervised_share"] == pytest.approx(metrics["supervised_tokens"] / kept, abs=1e-4)


@pytest.mark.parametrize("split", SPLITS)
def test_each_document_is_the_formatted_row_with_its_answer_supervised(split: str, packed: Workspace) -> None:
    tokenizer = Tokenizer.from_file(str(packed.root / "models/base/tokenizer.json"))
    parts = _formatted(packed, split)
    seen: list[int] = []
    for sequence in _sequences(packed, split):
        assert len(sequence["input_ids"]) <= 128
        for row, ids, labels in _documents(sequence):
            prompt, answer = parts[row]
            assert tokenizer.decode(ids, skip_special_tokens=False) == prompt + answer
            assert tokenizer.decode([i for i in labels if i != -100], skip_special_tokens=False) == answer
            assert labels[-1] == ids[-1] == tokenizer.token_to_id("<|end|>")
            seen.append(row)
    assert len(seen) == len(set(seen))
    assert {row for row in range(len(parts)) if row not in seen} == {
        row for row, text in enumerate(parts) if len(tokenizer.encode("".join(text)).ids) > 128
    }


def test_manifest_is_what_training_needs(packed: Workspace) -> None:
    manifest, source = packed.manifest("data/packed"), packed.manifest("data/formatted")
    assert {k: manifest[k] for k in ("template", "template_digest", "stop_token", "tokenizer_digest")} == {
        k: source[k] for k in ("template", "template_digest", "stop_token", "tokenizer_digest")
    }
    tokenizer = Tokenizer.from_file(str(packed.root / "models/base/tokenizer.json"))
    assert manifest["stop_token_id"] == tokenizer.token_to_id("<|end|>")
    assert manifest["max_length"] == 128
    assert manifest["train_tokens"] == sum(len(s["input_ids"]) for s in _sequences(packed, "train"))
    assert manifest["train_sequences"] == len(_sequences(packed, "train"))
    assert set(manifest["files"]) == {"train-00000.arrow", "validation-00000.arrow"}


def test_same_bytes_again(again: Workspace) -> None:
    before = again.files("data/packed")
    result = again.run("pack")
    assert (result.code, result.stderr) == (0, "")
    assert again.files("data/packed") == before


def test_truncation_is_counted_and_invents_no_stop(again: Workspace) -> None:
    """LONG loses its end, ENDLESS its whole answer, so that nothing of it is left to learn."""
    again.edit({"pack": {"long_documents": "truncate"}})
    assert again.run("pack").code == 0
    metrics = _tokens(again)
    assert metrics["documents_dropped"] == 1
    assert metrics["tokens_truncated"] > 0
    stop = again.manifest("data/packed")["stop_token_id"]
    cut = [
        (ids, labels)
        for split in SPLITS
        for sequence in _sequences(again, split)
        for _, ids, labels in _documents(sequence)
        if len(ids) == 128 and ids[-1] != stop
    ]
    assert len(cut) == 1
    ids, labels = cut[0]
    assert ids.count(stop) == 1  # the one that ends the question
    assert stop not in labels
    assert labels[-1] == ids[-1]
    assert all(any(label != -100 for label in labels[1:]) for s in _sequences(again, "train") for _, _, labels in _documents(s))


def test_fragments_pass_the_gate_and_repeat_the_system_turn(made_base: Workspace, tmp_path: Path) -> None:
    """What the smoke gate decodes are the answers of each fragment, though its beginning stands elsewhere in the row."""
    turns = [{"role": r, "content": f"{r} " * 4} for r in ("user", "assistant") * 6]
    chats = [{"messages": [{"role": "system", "content": f"You are number {n}."}, *turns]} for n in range(12)]
    workspace = make_workspace(tmp_path / "project", chats)
    shutil.copytree(made_base.root / "models", workspace.root / "models")
    workspace.edit({"pack": {"max_length": 96, "long_documents": "split"}})
    for stage in ("format", "pack"):
        result = workspace.run(stage)
        assert (result.code, result.stderr) == (0, "")
    metrics = _tokens(workspace)
    assert (metrics["documents_split"], metrics["documents_dropped"]) == (12, 0)
    assert metrics["tokens_repeated"] > 0
    model, packed = workspace.root / "models/base", workspace.root / "data/packed"
    tokenizer = load_tokenizer(model)
    sequences = _sequences(workspace, "train")
    texts = [tokenizer.tokenizer.decode(ids, skip_special_tokens=False) for s in sequences for _, ids, _ in _documents(s)]
    assert len(texts) > metrics["documents"]
    assert all(text.startswith("<|system|>You are number ") for text in texts)
    stop = workspace.manifest("data/packed")["stop_token_id"]
    checks = mask_checks(packed, workspace.root / "data/formatted", tokenizer, stop, range(len(sequences)))
    assert [(check.name, check.value) for check in checks] == [("loss_mask", 0), ("stop_token", 0)]


def test_a_set_without_held_out_rows(made_base: Workspace, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "project", rows(8))
    shutil.copytree(made_base.root / "models", workspace.root / "models")
    workspace.edit({"format": {"validation_share": 1e-9}})
    for stage in ("format", "pack"):
        result = workspace.run(stage)
        assert (result.code, result.stderr) == (0, "")
    assert workspace.metrics("pack")["validation_sequences"] == 0
    assert _sequences(workspace, "validation") == []
    assert len(_sequences(workspace, "train")) > 0


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        ("long", ["pack: data/formatted/", "tokens, pack.max_length is 128", "raise it or set pack.long_documents"]),
        ("all too long", ["all 62 documents dropped", "pack.max_length 8", "raise it"]),
        ("other tokenizer", ["data/formatted: made for tokenizer", "dvc repro format"]),
        ("not formatted", ["the formatted set is missing", "dvc repro"]),
        ("no base", ["no tokenizer.json", "dvc repro base"]),
    ],
)
def test_what_is_refused_leaves_the_earlier_set(case: str, needed: list[str], again: Workspace) -> None:
    before = again.files("data/packed", "metrics")
    match case:
        case "long":
            again.edit({"pack": {"long_documents": "error"}})
        case "all too long":
            again.edit({"pack": {"max_length": 8}})
        case "other tokenizer":
            with (again.root / "models/base/tokenizer.json").open("a") as file:
                file.write("\n")
        case "not formatted":
            shutil.rmtree(again.root / "data/formatted")
        case _:
            (again.root / "models/base/tokenizer.json").unlink()
    assert_refused(again.run("pack"), *needed)
    assert again.files("data/packed", "metrics") == before
