"""The export stage publishes a whole, right model or nothing.

Wrong behaviour these catch: shards that are gone or cut; an export that differs from the trained model; an earlier
export lost by a failed one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.project import Project

pytestmark = pytest.mark.e2e


def digest(project: Project) -> bytes:
    return (project.root / "models/export/manifest.json").read_bytes()


def shard_folder(project: Project) -> Path:
    record = json.loads((project.root / "models/checkpoint.json").read_text(encoding="utf-8"))
    return project.root / "models/runs" / record["folder"]


def test_missing_shards_are_named_with_the_way_to_get_them(copy: Project) -> None:
    before = digest(copy)
    shard = next(shard_folder(copy).glob("global_step*/*optim_states.pt"))
    shard.unlink()
    done = copy.stage("export")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert shard.name in line
    assert "dvc repro --force --single-item train" in line
    assert digest(copy) == before


def test_logits_that_differ_fail_the_export_and_keep_the_earlier_one(copy: Project) -> None:
    before = digest(copy)
    probe = shard_folder(copy).parent / "probe.safetensors"
    tensors = load_file(probe)
    tensors["logits"] = tensors["logits"] + 0.01
    save_file(tensors, probe)
    done = copy.stage("export")
    assert done.returncode == 2
    assert "logits of the export differ from the trained model's by 0.01" in done.stderr.splitlines()[-1]
    assert digest(copy) == before
    assert [p.name for p in (copy.root / "models").iterdir() if "partial" in p.name] == []


def test_the_folder_is_complete_and_says_where_to_stop(finished: Project) -> None:
    folder = finished.root / "models/export"
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["files"]) == names - {"manifest.json"}
    stop = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert {t["id"]: t["content"] for t in tokenizer["added_tokens"]}[stop] == manifest["stop_token"] == "<|end|>"
