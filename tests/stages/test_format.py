"""Stage `format`, run as dvc.yaml states it.

Would catch: rows that are not accounted for, a reject without its place, a split or an output that changes from run to
run, text that is not the source's, an earlier set lost to a failing run, an error with a traceback.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
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
    '{"instruction": "two places", "input": "i", "context": "c", "output": "a"}',
    '{"instruction": "stop <|end|>", "output": "a"}',
    '{"instruction": "half \\ud83d", "output": "a"}',
    '["not", "an", "object"]',
    "",
    "   ",
]
REASONS = {
    "broken_json": 1,
    "not_a_number": 1,
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


def _source(*files: str, **changes: Any) -> dict[str, Any]:
    return {"files": list(files), "record": "auto", "columns": {}, "weight": 1.0, "limit": None, **changes}


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
    again.edit({"format": {"sources": [_source("more.jsonl", "rows.jsonl")]}})
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
        (
            "over the limit",
            ["11 of 44 rows rejected (25.0%)", "format.max_reject_share is 24.9%", "broken_json 1 (rows.jsonl:31)"],
        ),
        ("blank", ["1 of 1 rows rejected", "empty_file 1 (rows.jsonl:1)"]),
        ("broken array", [f"{RAW}:2: the file ends before the array does", "repair it"]),
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


def _splits(workspace: Workspace) -> dict[str, list[dict[str, Any]]]:
    return {split: _arrow(workspace.root / f"data/formatted/{split}.arrow") for split in ("train", "validation")}


def _adds_up(metrics: dict[str, Any]) -> bool:
    """The two equations of the stage, and every breakdown."""
    dropped = metrics["rows_duplicate"] + metrics["rows_rejected"] + metrics["rows_left_out"]
    return (
        metrics["rows_in"] == metrics["rows_kept"] + dropped == metrics["rows_read"] + metrics["rows_expanded"]
        and metrics["train_rows"] + metrics["validation_rows"] == metrics["rows_kept"] + metrics["rows_repeated"]
        and metrics["rows_duplicate"] == sum(metrics["duplicates_by_kind"].values())
        and metrics["rows_left_out"] == sum(metrics["left_out_by_kind"].values())
        and metrics["rows_rejected"] == sum(metrics["rejected_by_reason"].values())
        and metrics["rows_read"] == sum(metrics["sources"].values())
    )


def _formatted(workspace: Workspace, **changes: Any) -> dict[str, Any]:
    workspace.edit({"format": changes})
    result = workspace.run("format")
    assert (result.code, result.stderr) == (0, "")
    metrics = workspace.metrics("format")
    splits, manifest = _splits(workspace), workspace.manifest("data/formatted")
    assert _adds_up(metrics), metrics
    assert {f"{s}_rows": len(r) for s, r in splits.items()} == {k: metrics[k] for k in ("train_rows", "validation_rows")}
    assert all(manifest[k] == metrics[k] for k in ("train_rows", "validation_rows"))
    assert set(manifest["files"]) == {"train.arrow", "validation.arrow", "rejects.jsonl"}
    return metrics


def _chat(question: str, *answers: str) -> dict[str, Any]:
    said = [m for a in answers for m in ({"role": "user", "content": question}, {"role": "assistant", "content": a})]
    return {"messages": said}


def test_files_of_several_forms(again: Workspace) -> None:
    """Each file's form is its own, and rows that say the same are one row whatever form they have."""
    raw = again.root / "data/raw"
    write_rows(raw / "alpaca.jsonl", rows(40))
    write_rows(raw / "chat.jsonl", [_chat(f"{r['instruction']}\n{r['input']}".strip("\n"), r["output"]) for r in rows(50)])
    write_rows(
        raw / "shared.jsonl", [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 1}]
    )
    write_rows(raw / "pairs.jsonl", [{"prompt": "p", "completion": "c"}])
    write_rows(
        raw / "seeds.jsonl", [{"instruction": "s", "instances": [{"input": "1", "output": "x"}, {"input": "2", "output": "y"}]}]
    )
    write_rows(raw / "mapped.jsonl", [{"frage": "f", "antwort": "g"}])
    write_rows(raw / "other.jsonl", [{"text": "t"}])
    mapped = _source("mapped.jsonl", record="alpaca", columns={"instruction": "frage", "output": "antwort"})
    others = ("alpaca.jsonl", "chat.jsonl", "shared.jsonl", "pairs.jsonl", "seeds.jsonl", "other.jsonl")
    metrics = _formatted(again, sources=[_source(*others), mapped])
    assert metrics["record_by_source"] == {
        "alpaca.jsonl": "alpaca",
        "chat.jsonl": "messages",
        "shared.jsonl": "sharegpt",
        "pairs.jsonl": "prompt_completion",
        "seeds.jsonl": "alpaca",
        "other.jsonl": "unknown",
        "mapped.jsonl": "alpaca",
    }
    assert metrics["rejected_by_reason"] == {"unknown_form": 1}
    assert metrics["duplicates_by_kind"] == {"exact": 40}
    assert (metrics["rows_kept"], metrics["rows_expanded"]) == (55, 1)
    places = {row["place"] for split in _splits(again).values() for row in split}
    assert {"seeds.jsonl:1#1", "seeds.jsonl:1#2", "chat.jsonl:50", "mapped.jsonl:1"} <= places
    assert "'text'" in (again.root / "data/formatted/rejects.jsonl").read_text(encoding="utf-8")


def test_weights_and_limits(again: Workspace) -> None:
    raw = again.root / "data/raw"
    for name in ("once", "half", "twice", "few"):
        write_rows(raw / f"{name}.jsonl", [{"instruction": f"{name} {n}", "output": "a"} for n in range(200)])
    sources = [
        _source("once.jsonl"),
        _source("half.jsonl", weight=0.5),
        _source("twice.jsonl", weight=2.0),
        _source("few.jsonl", limit=30),
    ]
    metrics = _formatted(again, sources=sources)
    splits = _splits(again)
    held = {n: [r["place"] for r in splits["validation"] if r["place"].startswith(n)] for n in ("once", "half", "twice", "few")}
    trained = {n: [r["place"] for r in splits["train"] if r["place"].startswith(n)] for n in held}
    assert len(held["once"]) + len(trained["once"]) == 200
    assert 60 < len(trained["half"]) < 100
    assert len(trained["twice"]) == 2 * len(set(trained["twice"])) == 2 * (200 - len(held["twice"]))
    assert len(held["few"]) + len(trained["few"]) == 30
    assert all(len(set(places)) == len(places) for places in held.values())
    assert metrics["left_out_by_kind"] == {"limit": 170, "weight": 200 - len(held["half"]) - len(trained["half"])}
    assert metrics["rows_repeated"] == 200 - len(held["twice"])
    before = again.files("data/formatted")
    assert again.run("format").code == 0
    assert again.files("data/formatted") == before


LONG = "The harbour master counted every boat that came in before the storm and wrote the number {} into the book. "


def test_near_duplicates_stand_on_neither_side(again: Workspace) -> None:
    values = [{"instruction": f"{n * 7919} {LONG.format(n) * 2}", "output": "数" * 20 + str(n)} for n in range(4)]
    different = [{"instruction": f"{n} {chr(0x4E00 + 50 * n)}" * 30, "output": "a"} for n in range(60)]
    write_rows(again.root / RAW, [*values, *different])
    assert _formatted(again)["rows_kept"] == 64
    metrics = _formatted(again, near_duplicates={"threshold": 0.6, "shingle": 5})
    assert metrics["duplicates_by_kind"] == {"exact": 0, "near": 3}
    places = {row["place"] for split in _splits(again).values() for row in split}
    assert {"rows.jsonl:1", "rows.jsonl:5", "rows.jsonl:64"} <= places
    assert not {"rows.jsonl:2", "rows.jsonl:3", "rows.jsonl:4"} & places


def test_decontamination(again: Workspace) -> None:
    passage = LONG.format(1)
    values = [{"instruction": f"{n} {chr(0x4E00 + 50 * n)}" * 9, "output": f"{n}"} for n in range(100)]
    quoting = [{"instruction": f"Where? {n}", "output": f"{chr(0x5E00 + n)} {passage.upper()}"} for n in range(40)]
    write_rows(again.root / RAW, [*values, *quoting])
    whole = _formatted(again)
    held = {row["place"] for row in _splits(again)["validation"]}
    quoted = {f"rows.jsonl:{n}" for n in range(101, 141)}
    assert held & quoted
    assert quoted - held
    metrics = _formatted(again, decontaminate={"run": 64})
    after = _splits(again)
    assert {row["place"] for row in after["validation"]} == held
    assert not quoted & {row["place"] for row in after["train"]}
    assert metrics["duplicates_by_kind"] == {"exact": 0, "decontaminated": len(quoted - held)}
    assert metrics["train_rows"] == whole["train_rows"] - len(quoted - held)


def test_no_question_nor_copy_on_both_sides(again: Workspace) -> None:
    """Whatever the seed: one opening question has one side, with all its answers and continuations."""
    values = [_chat(f"question {n % 50}", *[f"answer {n} {k}" for k in range(1 + n % 3)]) for n in range(200)]
    write_rows(again.root / RAW, values)
    for seed in (1, 2):
        _formatted(again, split_seed=seed)
        sides = [{row["parts"][0].split("<|end|>")[0] for row in split} for split in _splits(again).values()]
        assert all(sides)
        assert not sides[0] & sides[1]


def test_policies_are_counted(again: Workspace) -> None:
    values = [*rows(20), {"instruction": "stop <|end|>", "output": "<think>hm</think>a"}]
    write_rows(again.root / RAW, values)
    metrics = _formatted(again, special_tokens="escape", reasoning="strip")
    assert (metrics["escaped_rows"], metrics["stripped_rows"], metrics["rows_rejected"]) == (1, 1, 0)
    (row,) = [r for split in _splits(again).values() for r in split if r["place"] == "rows.jsonl:21"]
    assert row["parts"] == ["<|user|>stop <\u200b|end|><|end|><|assistant|>", "a<|end|>"]
    write_rows(again.root / RAW, [*rows(20), {"instruction": "q", "output": "b", "history": [["q", "a"]]}])
    own = (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A: "
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    _formatted(again, template="own", own_template=own, special_tokens="reject", reasoning="keep", supervise="last_turn")
    (row,) = [r for split in _splits(again).values() for r in split if r["place"] == "rows.jsonl:21"]
    assert row["parts"] == ["Q: q A: a<|end|>Q: q A: ", "b<|end|>"]


def test_a_file_in_two_sources_is_refused(again: Workspace) -> None:
    again.edit({"format": {"sources": [_source("rows.jsonl"), _source("*.jsonl", weight=2.0)]}})
    assert_refused(again.run("format"), RAW, "format.sources 1 and 2", "one weight")


def test_answers_that_become_rows_of_their_own_are_counted(again: Workspace) -> None:
    """A template that drops the reasoning of earlier turns: refused, or one row for each answer, all on one side."""
    template = again.root / "models/base/chat_template.jinja"
    last = "message['content'] if loop.last or message['role'] == 'user' else message['content'].split('</think>')[-1]"
    template.write_text(template.read_text().replace("message['content']", last))
    write_rows(
        again.root / "data/raw/chat.jsonl", [_chat(f"q{n}", *[f"<think>{k}</think>a{k}" for k in range(3)]) for n in range(9)]
    )
    sources = [_source("rows.jsonl"), _source("chat.jsonl")]
    write_rows(again.root / RAW, rows(20))
    metrics = _formatted(again, sources=sources)
    assert (metrics["rejected_by_reason"], metrics["rows_in"]) == ({"template": 9}, 29)
    metrics = _formatted(again, sources=sources, reasoning="split", near_duplicates={"threshold": 0.9, "shingle": 3})
    assert (metrics["rows_rejected"], metrics["rows_expanded"], metrics["rows_in"]) == (0, 18, 47)
    sides = [Counter(r["place"] for r in split if r["place"].startswith("chat")) for split in _splits(again).values()]
    assert set((sides[0] + sides[1]).values()) == {3}
    assert not sides[0].keys() & sides[1].keys()
