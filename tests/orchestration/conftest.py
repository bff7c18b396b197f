"""Fixtures: a blank git and DVC repository, copies of it, and one Prefect server for all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestration.toy import ROOT, STEP, Project, Server


@pytest.fixture(scope="session")
def blank_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed git and DVC repository without stages."""
    root = tmp_path_factory.mktemp("blank") / "repository"
    root.mkdir()
    (root / "step.py").write_text(STEP)
    shutil.copy(ROOT / "params.yaml", root)
    (root / ".gitignore").write_text("/.prefect/\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    shutil.copy(ROOT / ".dvc/config", root / ".dvc/config")
    subprocess.run([*git, "add", "-A"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "blank"], cwd=root, check=True)
    return root


@pytest.fixture
def project(blank_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A copy of the blank repository, and the working directory; nothing of it survives the test."""
    root = tmp_path / "project"
    shutil.copytree(blank_repository, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made = Project(root, uuid.uuid4().hex)
    yield made
    for pid in made.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all flows of the session: each would start its own for several seconds."""
    code = (
        "import os, sys; from pipeline.orchestration.server import start_server; "
        "start_server()(); print(os.environ['PREFECT_API_URL'], flush=True); sys.stdin.read()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}
    root = tmp_path_factory.mktemp("prefect")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    yield Server(process.stdout.readline().strip(), root / ".prefect")
    process.communicate(timeout=30)
