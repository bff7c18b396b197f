"""Fixtures shared by all rooms: one tiny scratch model, made once by the real stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fixtures import copy, finished  # noqa: F401 - fixtures of the stages' tests too
from tests.workspace import Workspace, make_workspace, rows


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, one of them takes all tests that need the finished project: building it takes a minute and a half."""
    for item in items:
        if "finished" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("project"))


@pytest.fixture(scope="session")
def made_base(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace whose stage `base` has run. Read it, do not write into it."""
    workspace = make_workspace(tmp_path_factory.mktemp("made") / "project", rows(60))
    result = workspace.run("base")
    assert result.code == 0, result.stderr
    return workspace


@pytest.fixture(scope="session")
def base_model(made_base: Workspace) -> Path:
    """The model folder of the tiny scratch base. Read only."""
    return made_base.root / "models/base"
