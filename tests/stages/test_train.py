"""The train stage starts only when proved, stops resumably, continues, and does nothing twice.

Wrong behaviour these catch: training without the verdicts for exactly this run; ranks that outlive a TERM; a stopped
run that starts again from nothing or ends with other weights; a second trainer in one run folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.training.owner import owned
from tests.e2e.project import Project

pytestmark = pytest.mark.e2e


def run_folder(project: Project) -> Path:
    record = json.loads((project.root / "models/checkpoint.json").read_text(encoding="utf-8"))
    return project.root / "models/runs" / record["fingerprint"]


def test_another_runs_verdict_is_refused(copy: Project) -> None:
    copy.replace("params.yaml", "learning_rate: 3.0e-3", "learning_rate: 2.0e-3")
    done = copy.stage("train")
    assert done.returncode == 3
    assert "models/gates/local/smoke.json: proves run" in done.stderr
    assert "run `dvc repro smoke@local`" in done.stderr


def test_a_finished_run_is_not_repeated(copy: Project) -> None:
    before = (copy.root / "models/checkpoint.json").read_bytes()
    done = copy.stage("train")
    assert done.returncode == 0, done.stderr
    assert "is finished" in done.stderr
    assert (copy.root / "models/checkpoint.json").read_bytes() == before


def test_a_second_trainer_in_the_run_folder_is_refused(copy: Project) -> None:
    with owned(run_folder(copy)):
        done = copy.stage("train")
    assert done.returncode == 2
    assert f"process {os.getpid()} on " in done.stderr


def test_term_saves_and_the_next_start_continues_to_the_same_weights(copy: Project) -> None:
    record = json.loads((copy.root / "models/checkpoint.json").read_text(encoding="utf-8"))
    run = run_folder(copy)
    shutil.rmtree(run)
    command = copy.command("train")
    process = subprocess.Popen(command, cwd=copy.root, env=copy.environment(), stderr=subprocess.PIPE, text=True)
    curve = run / "curve.jsonl"
    wait_for(lambda: curve.is_file() and len(curve.read_text().splitlines()) >= 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors[-1500:]
    assert "stopped on request at step" in errors
    assert survivors(copy.root) == []
    step = json.loads((run / "result.json").read_text())["step"]
    assert 3 <= step < record["step"]
    done = copy.stage("train")
    assert done.returncode == 0, done.stderr[-1500:]
    assert f"continues at checkpoint-{step}" in done.stderr
    after = json.loads((copy.root / "models/checkpoint.json").read_text(encoding="utf-8"))
    shards = [name for name in record["files"] if name.endswith("optim_states.pt")]
    assert len(shards) == 2
    assert [after["files"][n]["bytes"] for n in shards] == [record["files"][n]["bytes"] for n in shards]
    again = copy.stage("export")
    assert again.returncode == 0, again.stderr[-1500:]
    weights = (copy.root / "models/export/model.safetensors").read_bytes()
    assert copy.run("dvc", "checkout", "--force", "models/export").returncode == 0
    assert weights == (copy.root / "models/export/model.safetensors").read_bytes()


def test_a_checkpoint_of_another_number_of_ranks_is_refused_before_launch(copy: Project) -> None:
    (run_folder(copy) / "result.json").unlink()
    shutil.rmtree(max(run_folder(copy).glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2])))
    earlier = run_folder(copy) / "checkpoint-1"
    earlier.mkdir()
    marker = {"step": 1, "ranks": 4, "zero": 2, "global_batch": 4, "files": {}}
    (earlier / "complete.json").write_text(json.dumps(marker), encoding="utf-8")
    done = copy.stage("train")
    assert done.returncode == 2
    assert "saved by 4 ranks with ZeRO 2, this rung has 2 ranks with ZeRO 2" in done.stderr.splitlines()[-1]


def wait_for(happened, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, "ended before it was to be stopped"
        assert time.monotonic() < deadline, "did not get there in time"
        time.sleep(0.02)


def survivors(root: Path) -> list[int]:
    """Python processes that still work in the project's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                inside = Path(os.readlink(entry / "cwd")) == root  # noqa: PTH115 - resolves nothing further
            except OSError:
                continue
            if inside and sys.executable.rpartition("/")[0] in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
    return found
