"""Stage `format`, run as dvc.yaml states it.

Would catch: rows that are not accounted for, a reject without its place, a split or an output that changes from run to
run, text that is not the source's, an earlier set lost to a failing run, an error with a traceback.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from tests.workspace import Workspace, assert_refused, make_workspace, rows, write_rows

pytestmark = pytest.mark.unit

pa: Any = pyarrow

DIRTY = [
    '{"instruction": "cut off", "outp',
    '{"instruction": "no answer", "input": ""}',
    '{"instruction": "empty answer", "output": "  "}',
    '{"instruction": "", "output": "no question"}',
    '{"instruction": "number", "output": 6}',
    '{"instruction": "NaN", "output": "a", "weight": NaN}',
    '{"instruction": "turns", "output": "a", "history": [["x", "y"]]}',
    '{"instruction": "stop <|end|>", "output": "a"}',
    '{"instruction": "half \\ud83d", "output": "a"}',
    '["not", "an", "object"]',
    "",
    "   ",
]
REASONS = {
    "broken_json": 2,
    "missing_field": 1,
    "empty_answer": 1,
    "empty_question": 1,
    "not_text": 1,
    "unsupported_field": 1,
    "special_token": 1,
    "invalid_text": 1,
    "not_an_object": 1,
    "invalid_utf8": 1,
}
TEXT = {"instruction": " first\u2028row ", "context": "行\r\n2", "output": "\té 🙂‍↔️ e\u0301 ", "类别": "x", "\ud83d": 1}


def _dirty_file(path: Path) -> None:
    """30 good rows, 3 of them twice, 11 bad ones, blank lines, a mark, CRLF, no newline at the end."""
    good = [json.dumps(r, ensure_ascii=False) for r in rows(29)]
    lines = [json.dumps(TEXT), *good, *DIRTY, *good[:2], json.dumps({**TEXT, "input": TEXT["context"], "context": ""})]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b'\r\n{"instruction": "\xff", "output": "a"}')


def _arrow(path: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().to_pylist()


def _project(made_base: Workspace, root: Path, template: str = "chat") -> Workspace:
    workspace = make_workspace(root, rows(1))
    shutil.copytree(made_base.root / "models", workspace.root / "models")
    workspace.edit({"format": {"max_reject_share": 0.5, "template": template}})
    return workspace


@pytest.fixture(scope="module")
def formatted(made_base: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A project in which the stage has run on a dirty file. Read only."""
    workspace = _project(made_base, tmp_path_factory.mktemp("formatted") / "project")
    _dirty_file(workspace.root / "data/raw/rows.jsonl")
    result = workspace.run("format")
    assert (result.code, result.stderr) == (0, "")
    return workspace


@pytest.fixture
def again(formatted: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(formatted.root, tmp_path / "project")
    return Workspace(tmp_path / "project")


def test_accounting_adds_up(formatted: Workspace) -> None:
    metrics = formatted.metrics("format")
    assert metrics["rejected_by_reason"] == REASONS
    assert (metrics["rows_in"], metrics["rows_kept"], metrics["rows_duplicate"], metrics["rows_rejected"]) == (44, 30, 3, 11)
    assert metrics["rows_in"] == metrics["rows_kept"] + metrics["rows_duplicate"] + metrics["rows_rejected"]
    assert metrics["rows_kept"] == metrics["train_rows"] + metrics["validation_rows"]
    assert metrics["sources"] == {"rows.jsonl": 44}
    assert metrics["ignored_fields"] == {"类别": 2, "?": 2}


def test_every_reject_has_its_place(formatted: Workspace) -> None:
    lines = (formatted.root / "data/formatted/rejects.jsonl").read_text(encoding="utf-8").splitlines()
    rejects = [json.loads(line) for line in lines]
    places = [*(f"rows.jsonl:{n}" for n in range(31, 41)), "rows.jsonl:46"]
    assert [r["place"] for r in rejects] == places
    assert all(set(r) == {"place", "reason", "detail"} and r["detail"] for r in rejects)


def test_rows_and_manifest(formatted: Workspace) -> None:
    splits = {split: _arrow(formatted.root / f"data/formatted/{split}.arrow") for split in ("train", "validation")}
    manifest = formatted.manifest("data/formatted")
    assert {s: len(r) for s, r in splits.items()} == {s: manifest[f"{s}_rows"] for s in splits}
    assert manifest["stop_token"] == "<|end|>"
    assert manifest["tokenizer_digest"] == formatted.manifest("models/base")["files"]["tokenizer.json"]
    kept = [row for rows_ in splits.values() for row in rows_]
    assert len({row["key"] for row in kept}) == 30
    assert all(len(row["parts"]) == 2 and row["parts"][1].endswith("<|end|>") for row in kept)
    (first,) = [row for row in kept if row["place"] == "rows.jsonl:1"]
    assert first["parts"] == [
        f"<|user|>{TEXT['instruction']}\n{TEXT['context']}<|end|><|assistant|>",
        f"{TEXT['output']}<|end|>",
    ]


def test_same_bytes_again(again: Workspace) -> None:
    before = again.files("data/formatted")
    result = again.run("format")
    assert (result.code, result.stderr) == (0, "")
    assert again.files("data/formatted") == before


def test_order_of_rows_changes_no_side(again: Workspace) -> None:
    before = {s: {r["key"] for r in _arrow(again.root / f"data/formatted/{s}.arrow")} for s in ("train", "validation")}
    assert before["validation"]
    write_rows(again.root / "data/raw/more.jsonl", reversed(rows(40)))
    again.edit({"format": {"files": ["more.jsonl", "rows.jsonl"]}})
    assert again.run("format").code == 0
    after = {s: {r["key"] for r in _arrow(again.root / f"data/formatted/{s}.arrow")} for s in ("train", "validation")}
    assert before["train"] <= after["train"]
    assert before["validation"] <= after["validation"]
    assert again.metrics("format")["sources"] == {"more.jsonl": 40, "rows.jsonl": 44}


def test_alpaca_template(again: Workspace) -> None:
    again.edit({"format": {"template": "alpaca_zh"}})
    assert again.run("format").code == 0
    kept = _arrow(again.root / "data/formatted/train.arrow")
    assert all(row["parts"][0].startswith("请完成下面的指令所描述的任务。\n\n### 指令:\n") for row in kept)
    assert all(row["parts"][0].endswith("\n\n### 响应:\n") and row["parts"][1].endswith("<|end|>") for row in kept)


def test_a_row_that_the_template_refuses_is_a_reject(again: Workspace) -> None:
    """One bad row never ends the job; a template that fails for all does, before a row is read."""
    template = again.root / "models/base/chat_template.jinja"
    source = template.read_text()
    template.write_text("{% if '第1只猫' in messages[0].content %}{{ raise_exception('no cats') }}{% endif %}" + source)
    assert again.run("format").code == 0
    metrics = again.metrics("format")
    assert metrics["rejected_by_reason"] == {**REASONS, "template": 1}
    assert metrics["rows_in"] == metrics["rows_kept"] + metrics["rows_duplicate"] + metrics["rows_rejected"] == 44
    assert "no cats" in (again.root / "data/formatted/rejects.jsonl").read_text(encoding="utf-8")
    before = again.files("data/formatted")
    template.write_text("{{ raise_exception('nobody') }}")
    assert_refused(again.run("format"), "format: ", "the chat template fails: nobody", "alpaca_en")
    assert again.files("data/formatted") == before


RAW = "data/raw/rows.jsonl"


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        ("missing", [f"format: {RAW}: no such file", "other.jsonl"]),
        ("empty", [f"format: {RAW}: 0 bytes", "at least one row"]),
        ("bad", ["44 of 44 rows rejected (100.0%)", "format.max_reject_share is 50.0%", "not_an_object 44", "raise the limit"]),
        ("over the limit", ["11 of 44 rows rejected (25.0%)", "format.max_reject_share is 24.9%", "broken_json 2"]),
        ("blank", ["0 usable rows", "add rows"]),
        ("broken array", [f"{RAW}: begins as a JSON array", "one object per line"]),
        ("nothing to train on", ["1 usable rows", "format.validation_share"]),
        ("no base", ["tokenizer", "models/base", "dvc repro"]),
        ("no chat template", ["template 'chat'", "no chat template", "alpaca_en"]),
        ("misspelt", ["params.yaml: format.templat", "did you mean 'template'?"]),
    ],
)
def test_what_is_refused_leaves_the_earlier_set(case: str, needed: list[str], again: Workspace) -> None:
    before = again.files("data/formatted", "metrics")
    raw = again.root / RAW
    match case:
        case "missing":
            raw.rename(raw.with_name("other.jsonl"))
        case "empty":
            raw.write_bytes(b"")
        case "bad":
            write_rows(raw, range(44))
        case "over the limit":
            again.edit({"format": {"max_reject_share": 0.249}})
        case "blank":
            raw.write_bytes(b"\r\n \n")
        case "broken array":
            raw.write_text('[{"instruction": "q", "output": "a"},')
        case "nothing to train on":
            write_rows(raw, rows(1))
            again.edit({"format": {"validation_share": 0.999999}})
        case "no base":
            shutil.rmtree(again.root / "models/base")
        case "no chat template":
            (again.root / "models/base/chat_template.jinja").unlink()
        case _:
            again.edit({"format": {"templat": "chat"}})
    assert_refused(again.run("format"), *needed)
    assert again.files("data/formatted", "metrics") == before
    assert [p.name for p in (again.root / "data").iterdir() if p.name.startswith(".")] == []
