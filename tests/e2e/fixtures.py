"""One real run of the whole pipeline, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.project import Project, clone, create


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after one `dvc repro`; tests read it and must not change it."""
    project = create(tmp_path_factory.mktemp("e2e") / "project")
    done = project.repro()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return project


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Project:
    """A copy of the finished project that a test may change."""
    return clone(finished, tmp_path / "project")
