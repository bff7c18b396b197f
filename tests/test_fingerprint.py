"""Code as part of a run's identity.

Would catch: a file that a module needs and the fingerprint does not see (a stale checkpoint would be resumed by other
code), a digest that depends on where the checkout lies, a digest of plumbing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.fingerprint import PLUMBING, closure, code_digest, is_plumbing
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

RANK = "pipeline.training.sft"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "stages/__init__.py": "import pipeline.unrelated",
        "stages/work.py": "from pipeline.room import one\nimport json, os.path\n",
        "pipeline/__init__.py": "",
        "pipeline/room/__init__.py": "import pipeline.unrelated",
        "pipeline/room/one.py": "def f():\n    from pipeline.room.two import name\n",
        "pipeline/room/two.py": "RANK = 'pipeline.room.rank'\nTEXT = 'see pipeline.unrelated for more'\n",
        "pipeline/room/rank.py": "import pipeline.room.one  # a circle\nimport pipeline.room.three as three\n",
        "pipeline/room/three.py": "NAME = 'pipeline.nowhere'\n",
        "pipeline/unrelated.py": "",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_closure_follows_imports_and_module_names(tree: Path) -> None:
    names = ["one", "rank", "three", "two"]
    assert closure("stages.work", tree) == (*(Path(f"pipeline/room/{n}.py") for n in names), Path("stages/work.py"))


def test_closure_of_a_leaf_is_itself(tree: Path) -> None:
    assert closure("pipeline.room.three", tree) == (Path("pipeline/room/three.py"),)
    assert closure("pipeline.nowhere", tree) == ()


def test_closure_is_relative(tree: Path) -> None:
    assert not [p for p in closure(RANK) if p.is_absolute() or not (ROOT / p).is_file()]


def test_the_training_code_holds_what_training_needs() -> None:
    files = {p.as_posix() for p in closure(RANK)}
    assert {"pipeline/training/sft.py", "pipeline/training/batching.py", "pipeline/training/checkpoint.py"} <= files
    assert not {f for f in files if f.startswith(("stages/", "pipeline/orchestration/", "tests/"))}


def test_the_gates_run_what_they_prove() -> None:
    """A gate starts its ranks by module name; without following it the training code would not be among its deps."""
    assert "pipeline/training/sft.py" in {p.as_posix() for p in closure("stages.smoke")}
    assert "pipeline/training/sft.py" in {p.as_posix() for p in closure("stages.resume")}


def test_plumbing_is_a_path_not_a_prefix_of_a_name() -> None:
    assert is_plumbing(Path("pipeline/config/params.py"))
    assert is_plumbing(Path("pipeline/stage.py"))
    assert not is_plumbing(Path("pipeline/configuration.py"))
    assert not is_plumbing(Path("pipeline/training/sft.py"))
    assert not [p for p in PLUMBING if not (ROOT / p).exists()]


def _digest_in(checkout: Path) -> str:
    code = f"from pipeline.fingerprint import code_digest; print(code_digest({RANK!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_digest_changes_with_the_code_and_with_nothing_else(tmp_path: Path) -> None:
    checkout = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "pipeline", checkout / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    assert _digest_in(checkout) == code_digest(RANK)
    with (checkout / "pipeline/stage.py").open("a") as file:
        file.write("\n# plumbing\n")
    with (checkout / "pipeline/orchestration/dag.py").open("a") as file:
        file.write("\n# not training\n")
    assert _digest_in(checkout) == code_digest(RANK)
    with (checkout / "pipeline/training/batching.py").open("a") as file:
        file.write("\n# training\n")
    assert _digest_in(checkout) != code_digest(RANK)
