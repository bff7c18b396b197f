"""Stage `base`, run as dvc.yaml states it.

Would catch: a base model that differs from run to run, one whose content was not checked, a folder that is no model laid
down as one, an earlier model lost to a failing run, an error with a traceback.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.base.size import measure
from tests.workspace import Workspace, assert_refused, make_workspace, rows

pytestmark = pytest.mark.unit


@pytest.fixture
def workspace(made_base: Workspace, tmp_path: Path) -> Workspace:
    """A project in which the stage has run before; what it left must survive a failure."""
    made = make_workspace(tmp_path / "project", rows(60))
    for folder in ("models", "metrics"):
        shutil.copytree(made_base.root / folder, made.root / folder)
    return made


def test_scratch_base_loads_and_is_what_was_asked_for(base_model: Path, made_base: Workspace) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_model)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (16, 1, len(tokenizer))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.tie_word_embeddings
    metrics = made_base.metrics("base")
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters())
    assert metrics["vocab_size"] == len(tokenizer) <= 400
    for row in rows(8):
        assert tokenizer.decode(tokenizer(row["output"])["input_ids"]) == row["output"]
    assert [tokenizer.decode(i) for i in tokenizer("2026")["input_ids"]] == ["2", "0", "2", "6"]


def test_manifest_lists_what_is_there(base_model: Path, made_base: Workspace) -> None:
    manifest = made_base.manifest("models/base")
    assert manifest["kind"] == "scratch"
    assert manifest["files"] == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in base_model.iterdir() if p.name != "manifest.json"
    }
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(
        manifest["files"]
    )


def test_same_bytes_again_and_bad_rows_teach_nothing(made_base: Workspace, tmp_path: Path) -> None:
    """A dirty file with the same good rows gives the same base, half surrogates and all."""
    dirty: list[object] = [
        3,
        {"instruction": "q"},
        {"instruction": "q", "output": "a<|end|>"},
        {"instruction": "\ud83d", "output": "a"},
    ]
    made = make_workspace(tmp_path / "project", [])
    text = (made_base.root / "data/raw/rows.jsonl").read_text(encoding="utf-8")
    first, second = text.splitlines(keepends=True)[:2], text.splitlines(keepends=True)[2:]
    first[0] = first[0].replace('{"', '{"note": "\\ud83d", "', 1)
    bad = [f"{json.dumps(value)}\n" for value in dirty]
    (made.root / "data/raw/rows.jsonl").write_text("".join([*first, *bad, "{cut", "\n", *second]), encoding="utf-8")
    result = made.run("base")
    assert (result.code, result.stderr) == (0, "")
    assert made.manifest("models/base") == made_base.manifest("models/base")


def test_a_path_base_is_checked_then_laid_down(workspace: Workspace, base_model: Path) -> None:
    """The error for a wrong hash gives the right one; with it the same weights arrive."""
    shutil.copytree(base_model, workspace.root / "given")
    (workspace.root / "given/training_state.bin").write_bytes(b"pickled")
    before = workspace.files("models", "metrics")
    base: dict[str, Any] = {"kind": "path", "path": "given", "content": "0" * 64, "new_tokens": []}
    workspace.edit({"base": base})
    result = workspace.run("base")
    assert_refused(result, "base: base.content = '000000000000...'", "write it there")
    assert workspace.files("models", "metrics") == before
    found = re.search(r"content is ([0-9a-f]{64})", result.stderr)
    assert found
    workspace.edit({"base": {**base, "content": found[1]}})
    result = workspace.run("base")
    assert (result.code, result.stderr) == (0, "")
    laid = workspace.root / "models/base"
    assert (laid / "model.safetensors").read_bytes() == (base_model / "model.safetensors").read_bytes()
    assert (laid / "chat_template.jinja").read_bytes() == (base_model / "chat_template.jinja").read_bytes()
    assert not (laid / "training_state.bin").exists()
    assert workspace.manifest("models/base")["kind"] == "path"
    assert measure(laid) == measure(base_model)
    text = "翻译成英文：🙂 <|user|>"
    assert AutoTokenizer.from_pretrained(laid)(text) == AutoTokenizer.from_pretrained(base_model)(text)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no such folder": (
        {"kind": "path", "path": "nowhere", "content": "0" * 64, "new_tokens": []},
        ["base.path = 'nowhere'", "no such folder"],
    ),
    "no model": (
        {"kind": "path", "path": "data/raw", "content": "0" * 64, "new_tokens": []},
        ["base.path = 'data/raw'", "no config.json"],
    ),
    "pickled": (
        {"kind": "path", "path": "pickled", "content": "0" * 64, "new_tokens": []},
        ["no *.safetensors", "save_pretrained"],
    ),
    "own code": ({"kind": "path", "path": "coded", "content": "0" * 64, "new_tokens": []}, ["auto_map", "which is not run"]),
    "branch of the hub": (
        {"kind": "hub", "id": "owner/name", "revision": "main", "new_tokens": []},
        ['params.yaml: base.revision = "main"', "[0-9a-f]{40}"],
    ),
    "other gguf content": (
        {"kind": "gguf", "package": None, "file": "data/raw/rows.jsonl", "sha256": "0" * 64, "new_tokens": []},
        ["base.sha256 = '000000000000...'", "write it there"],
    ),
    "no gguf file": (
        {"kind": "gguf", "package": None, "file": "models/none.gguf", "sha256": "0" * 64, "new_tokens": []},
        ["base.file = 'models/none.gguf'", "no such file"],
    ),
    "gguf package not installed": (
        {"kind": "gguf", "package": "no_such_package", "file": "a.gguf", "sha256": "0" * 64, "new_tokens": []},
        ["base.package = 'no_such_package'", "pip install no-such-package"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_earlier_model(case: str, workspace: Workspace) -> None:
    base, needed = REFUSED[case]
    for name, config, weights in (("pickled", "{}", "pytorch_model.bin"), ("coded", '{"auto_map": {}}', "model.safetensors")):
        (workspace.root / name).mkdir()
        (workspace.root / name / "config.json").write_text(config)
        (workspace.root / name / weights).write_bytes(b"x")
    before = workspace.files("models", "metrics")
    workspace.edit({"base": base})
    assert_refused(workspace.run("base"), "base: ", *needed)
    assert workspace.files("models", "metrics") == before


def test_missing_and_empty_corpus(workspace: Workspace) -> None:
    before = workspace.files("models", "metrics")
    (workspace.root / "data/raw/rows.jsonl").write_bytes(b"")
    assert_refused(workspace.run("base"), "base: data/raw/rows.jsonl: 0 bytes", "at least one row")
    (workspace.root / "data/raw/rows.jsonl").rename(workspace.root / "data/raw/other.jsonl")
    assert_refused(workspace.run("base"), "base: data/raw/rows.jsonl: no such file", "other.jsonl")
    assert workspace.files("models", "metrics") == before
