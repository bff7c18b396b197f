"""A small copy of the whole project as a git and DVC repository: the real stages, on a tiny model and two gloo ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "vocab_size: 1024": "vocab_size: 400",
    "hidden_size: 128": "hidden_size: 32",
    "intermediate_size: 384": "intermediate_size: 64",
    "num_hidden_layers: 4": "num_hidden_layers: 2",
    "num_attention_heads: 4": "num_attention_heads: 2",
    "samples: 100": "samples: 20",
    "  epochs: 4": "  epochs: 12",
    "  epochs: 16": "  epochs: 8",
    "rows: 200": "rows: 20",
    "max_new_tokens: 40": "max_new_tokens: 12",
}
"""Edits of the shipped params.yaml; each must apply, so that a renamed value does not silently run at full size."""

SMALL_ROWS = 150
"""Raw lines kept. At the shipped rate of dirt some are bad."""


@dataclass(frozen=True)
class Project:
    root: Path

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 400) -> subprocess.CompletedProcess[str]:
        """Run a command in the project with this interpreter's tools first on the PATH."""
        return subprocess.run(
            command, cwd=self.root, env=self.environment(env), capture_output=True, text=True, timeout=timeout, check=False
        )

    def repro(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return self.run("dvc", "repro", *arguments, env=env)

    def command(self, name: str) -> list[str]:
        """The command dvc.yaml states for a stage, `{key}` and `{item}` of a rung filled in."""
        word, _, rung = name.partition("@")
        body = YAML(typ="safe", pure=True).load((self.root / "dvc.yaml").read_text(encoding="utf-8"))["stages"][word]
        text = body.get("do", body)["cmd"].replace("${key}", rung).replace("${item}", "ground")
        return [sys.executable if word == "python" else word for word in shlex.split(text)]

    def stage(self, name: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run one stage as DVC would, its file outputs removed first."""
        command = self.command(name)
        for flag, value in zip(command[3::2], command[4::2], strict=True):
            if flag in ("--verdict", "--checkpoint") and name != "export":
                (self.root / value).unlink(missing_ok=True)
        return self.run(*command, env=env)

    def with_fault(self, name: str, folder: Path) -> dict[str, str]:
        """An environment in which every Python process plants the fault (`pipeline/gates/faults.py`)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(f"from pipeline.gates.faults import arm\narm({name!r})\n", encoding="utf-8")
        return {"PYTHONPATH": f"{folder}{os.pathsep}{self.root}"}

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "DVC_NO_ANALYTICS": "1", "PYTHONPATH": str(self.root), **(more or {})}

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace a text that must be in the file exactly once."""
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new), encoding="utf-8")


def create(folder: Path) -> Project:
    """Copy the files git knows or would take, shrink what is trained, commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in listed:
        if name.startswith(("tests/", "docs/", "metrics/", "plots/")) or name == "dvc.lock" or not (ROOT / name).is_file():
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    project = Project(folder)
    for old, new in SMALL.items():
        project.replace("params.yaml", old, new)
    sample = folder / "data/raw/sample.jsonl"
    sample.write_text("".join(sample.read_text(encoding="utf-8").splitlines(keepends=True)[:SMALL_ROWS]), encoding="utf-8")
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@example.invalid")
    for command in (("git", "init", "-q"), ("git", "add", "-A"), (*git, "commit", "-qm", "small")):
        done = project.run(*command)
        assert done.returncode == 0, done.stderr
    return project


def clone(project: Project, folder: Path) -> Project:
    """The same project elsewhere, results and cache included, so that a test can change it."""
    shutil.copytree(project.root, folder, symlinks=True)
    return Project(folder)


def stages_run(output: str) -> list[str]:
    """Names of the stages that DVC says it ran."""
    return re.findall(r"^Running stage '([^']+)'", output, re.MULTILINE)
