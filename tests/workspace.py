"""A temporary project folder in which real stages run, with a small multilingual corpus and a tiny scratch model.

A stage is started with the very command that dvc.yaml states, so that flags and paths are the declared ones.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]

TINY: dict[str, Any] = {
    "base": {
        "kind": "scratch",
        "corpus": ["rows.jsonl"],
        "vocab_size": 400,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "seed": 1,
    },
    "format": {
        "sources": [{"files": ["rows.jsonl"], "record": "auto", "columns": {}, "weight": 1.0, "limit": None}],
        "validation_share": 0.2,
    },
    "pack": {"max_length": 128},
}
"""What a workspace changes of the shipped params.yaml."""

_QUESTIONS = (
    ("Name the colour of {}.", "snow number {}", "It is white {}."),
    ("翻译成英文：{}", "第{}只猫", "cat number {}。"),
    ("{} を数えてください。", "りんご{}個", "{}個です。"),
    ("What does 😀 mean in {}?", "", "A smile 🙂, {} times."),
)


def rows(count: int) -> list[dict[str, str]]:
    """Distinct alpaca rows in English, Chinese, Japanese and emoji."""
    made: list[dict[str, str]] = []
    for number in range(count):
        instruction, context, answer = _QUESTIONS[number % len(_QUESTIONS)]
        made.append({"instruction": instruction.format(number), "input": context.format(number), "output": answer.format(number)})
    return made


def write_rows(path: Path, values: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values), encoding="utf-8")


@dataclass(frozen=True)
class Result:
    code: int
    stderr: str


@dataclass(frozen=True)
class Workspace:
    root: Path

    def edit(self, changes: dict[str, dict[str, Any]]) -> None:
        """Change values of params.yaml section by section; a section with a `kind` is replaced."""
        path = self.root / "params.yaml"
        yaml = YAML(typ="safe", pure=True)
        params: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"))
        for section, values in changes.items():
            params[section] = dict(values) if "kind" in values else {**params[section], **values}
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(params, file)

    def run(self, stage: str) -> Result:
        """Run a stage as dvc.yaml states it."""
        stages: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
        command = shlex.split(stages[stage]["cmd"])
        assert command[0] == "python"
        ended = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        return Result(ended.returncode, ended.stderr)

    def metrics(self, stage: str) -> dict[str, Any]:
        return json.loads((self.root / f"metrics/{stage}.json").read_text(encoding="utf-8"))

    def manifest(self, folder: str) -> dict[str, Any]:
        return json.loads((self.root / folder / "manifest.json").read_text(encoding="utf-8"))

    def files(self, *folders: str) -> dict[str, bytes]:
        """Every file below some folders and its bytes."""
        found = [p for folder in folders for p in sorted((self.root / folder).rglob("*")) if p.is_file()]
        return {p.relative_to(self.root).as_posix(): p.read_bytes() for p in found}


def make_workspace(root: Path, values: Iterable[object]) -> Workspace:
    """A project with the shipped parameters in tiny and some raw rows."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "params.yaml", root)
    workspace = Workspace(root)
    workspace.edit(TINY)
    write_rows(root / "data/raw/rows.jsonl", values)
    return workspace


def assert_refused(result: Result, *needed: str, code: int = 2) -> None:
    """One line on stderr that holds every needed text, and the exit code of a user error."""
    assert result.code == code, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for text in needed:
        assert text in lines[0]
