"""`ladder run` over the real stages: it skips what is done, ends everything on TERM in mid-train, and goes on where it stopped.

Wrong behaviour these catch: a flow that repeats stages; ranks, DVC or a server left alive by a TERM; training from anew.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from tests.e2e.project import Project
from tests.stages.test_train import run_folder, survivors, wait_for

pytestmark = pytest.mark.e2e

LADDER = (sys.executable, "-m", "pipeline.cli")


def outcomes(output: str) -> dict[str, str]:
    """Stage and outcome of each row of the table that `ladder run` ends with."""
    rows = [line.split() for line in output.splitlines()]
    words = {"skipped", "restored", "ran", "failed", "stopped", "not"}
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[1] in words}


def forget_cached(project: Project, out: str) -> None:
    """Remove an output and what DVC would restore it from, so that its stage, and no other, has to run."""
    lock = YAML(typ="safe", pure=True).load((project.root / "dvc.lock").read_text(encoding="utf-8"))
    (md5,) = (o["md5"] for stage in lock["stages"].values() for o in stage.get("outs", []) if o["path"] == out)
    (project.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).unlink()
    shutil.rmtree(project.root / ".dvc/cache/runs")
    (project.root / out).unlink()


def test_term_in_mid_train_leaves_nothing_and_the_next_run_resumes(copy: Project) -> None:
    run = run_folder(copy)
    shutil.rmtree(run)
    forget_cached(copy, "models/checkpoint.json")
    process = subprocess.Popen(
        [*LADDER, "run"], cwd=copy.root, env=copy.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    curve = run / "curve.jsonl"
    wait_for(lambda: curve.is_file() and len(curve.read_text().splitlines()) >= 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 75, output[-2000:]
    assert survivors(copy.root) == []
    step = json.loads((run / "result.json").read_text())["step"]
    resumed = copy.run(*LADDER, "run")
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-2000:]
    assert f"continues at checkpoint-{step}" in resumed.stdout + resumed.stderr
    found = outcomes(resumed.stdout + resumed.stderr)
    assert found["train"] == "ran"
    assert {found[name] for name in ("base", "format", "pack", "smoke@local", "resume@local")} == {"skipped"}
    again = copy.run(*LADDER, "run")
    assert again.returncode == 0
    found = outcomes(again.stdout + again.stderr)
    assert len(found) == 8
    assert set(found.values()) == {"skipped"}
