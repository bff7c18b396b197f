"""Real git and DVC repositories with toy stages, and `ladder` as a user runs it.

A toy command is `python step.py NAME OUT [INPUT ...] [--metrics FILE]`: it notes its run in `runs.log`, does what a file
`do/NAME` says (an exit code, or `sleep`), joins its inputs to its output. Every process of a test carries MARK in
its environment, so that survivors are found in whatever session or group they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

STEP = """
import os, pathlib, signal, subprocess, sys, time
name, out, *inputs = sys.argv[1:]
metrics = inputs.pop() if "--metrics" in inputs else None
inputs = [i for i in inputs if i != "--metrics"]
with open("runs.log", "a") as log:
    log.write(name + "\\n")
order = pathlib.Path("do", name)
words = order.read_text().split() if order.exists() else []
if words and words[0] == "once":  # ORDER for the first so many runs
    if open("runs.log").read().split().count(name) > int(words[1]):
        words = []
    else:
        words = words[2:]
if words == ["sleep"]:
    def save(*_):
        time.sleep(1)
        pathlib.Path("saved-" + name).write_text("1")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    # As torchrun does: a grandchild in a session of its own.
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path("sleeping-" + name).write_text(str(os.getpid()))
    time.sleep(300)
elif words:
    pathlib.Path(out).write_text("broken")
    sys.exit(int(words[0]))
pathlib.Path(out).write_text(name + "(" + ",".join(pathlib.Path(i).read_text() for i in inputs) + ")")
if metrics:
    pathlib.Path(metrics).write_text('{"of": "' + name + '"}')
"""


class Project:
    """A repository in a temporary folder."""

    def __init__(self, root: Path, mark: str) -> None:
        self.root = root
        self.mark = mark

    def write(self, dvc_yaml: str) -> None:
        (self.root / "dvc.yaml").write_text(dvc_yaml)

    def order(self, stage: str, what: str | None) -> None:
        """What the stage's next runs do; None: their work."""
        path = self.root / "do" / stage
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if what is not None:
            path.write_text(what)

    def set_seed(self, seed: int) -> None:
        """Change `train.seed`, the one parameter toy stages depend on."""
        original = (ROOT / "params.yaml").read_text()
        before, _, train = original.partition("\ntrain:")
        (self.root / "params.yaml").write_text(f"{before}\ntrain:{train.replace('seed: 1', f'seed: {seed}', 1)}")

    def text(self, name: str) -> str:
        return (self.root / name).read_text()

    @property
    def runs(self) -> list[str]:
        """Stages whose commands ran, in order."""
        path = self.root / "runs.log"
        return path.read_text().split() if path.exists() else []

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "MARK": self.mark, **more}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=self.root,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as a shell's job: a signal to it does not reach the tests
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def alive(self) -> dict[int, str]:
        """Living processes that carry the mark."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if not dead and f"MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:.0f} s still not: {what}")
        time.sleep(0.1)


class Server:
    """A running Prefect server."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = home

    def give_database(self, project: Project) -> None:
        """Spare a project's own server the making of its database, about 6 s."""
        target = project.root / ".prefect"
        target.mkdir()
        with (
            contextlib.closing(sqlite3.connect(self.home / "prefect.db")) as here,
            contextlib.closing(sqlite3.connect(target / "prefect.db")) as there,
        ):
            here.backup(there)

    def ask(self, what: str) -> list[dict[str, Any]]:
        """All records of a kind, such as `flow_runs`, newest first."""
        request = urllib.request.Request(
            f"{self.url}/{what}/filter", data=b"{}", headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return sorted(json.loads(answer.read()), key=lambda record: str(record["created"]), reverse=True)
