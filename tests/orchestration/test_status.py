"""What `ladder status` tells, from real repositories, real processes and the files a run leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.orchestration import dag
from pipeline.orchestration.status import find_trainers, stage_states, start_ticks, status_text
from tests.orchestration.toy import ROOT, Project, wait_for

pytestmark = pytest.mark.unit

TWO = """
stages:
  train:
    cmd: python step.py train train.txt --metrics train.json
    params: [train.seed]
    outs: [train.txt]
    metrics: [train.json: {cache: false}]
    meta: {retries: 1}
  after: {cmd: python step.py after after.txt train.txt, deps: [train.txt], outs: [after.txt]}
"""


def states() -> dict[str, str]:
    nodes = dag.stages(None)
    return dict(stage_states(nodes, find_trainers(nodes)))


def write(path: str, value: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(value))


def test_stages_are_never_run_up_to_date_and_stale_with_a_reason(project: Project) -> None:
    project.write(TWO)
    assert states() == {"train": "stale: never ran", "after": "stale: never ran"}
    assert project.run("dvc", "repro").returncode == 0
    assert states() == {"train": "up to date", "after": "up to date"}
    project.set_seed(2)
    assert states() == {"train": "stale: train.seed modified", "after": "stale: after train"}


def test_running_is_said_only_while_its_process_lives(project: Project) -> None:
    project.write(TWO)
    project.order("train", "sleep")
    process = project.start("dvc", "repro")
    wait_for(Path("sleeping-train").exists, "the stage runs")
    assert states()["train"] == f"running, dvc process {process.pid}"
    start = time.monotonic()
    assert project.run("pipeline.cli", "status").returncode == 0
    assert time.monotonic() - start < 3.0

    process.kill()  # leaves DVC's claim behind
    process.wait()
    assert states()["train"] == "stopped before its end; `ladder run` continues"


RUNS = """
stages:
  train: {cmd: true --runs models/runs --checkpoint checkpoint.json, outs: [checkpoint.json], meta: {retries: 2}}
  export: {cmd: true --runs models/runs --checkpoint checkpoint.json, deps: [checkpoint.json], outs: [export]}
"""


def test_a_trainer_is_alive_dead_another_process_or_elsewhere(project: Project) -> None:
    project.write(RUNS)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = start_ticks(child.pid)
    assert start is not None
    here = socket.gethostname()
    write("models/runs/alive/owner.json", {"host": here, "pid": child.pid, "start": start})
    write("models/runs/reused/owner.json", {"host": here, "pid": child.pid, "start": start - 1})
    write("models/runs/elsewhere/owner.json", {"host": f"not-{here}", "pid": child.pid, "start": start})
    write("models/runs/torn/owner.json", {"host": here})
    told = {t.fingerprint: str(t) for t in find_trainers(dag.stages(None))}
    assert told == {
        "alive": f"running, process {child.pid}",
        "reused": f"stopped, process {child.pid} is gone",
        "elsewhere": f"owned by process {child.pid} on not-{here}, not visible from here",
    }

    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None  # a zombie does not run
    child.wait()
    assert str(find_trainers(dag.stages(None))[0]) == f"stopped, process {child.pid} is gone"
    # The stage that resumes was stopped; the one that only reads the same folder is merely stale.
    assert states() == {"train": "stopped before its end; `ladder run` continues", "export": "stale: never ran"}


GATES = """
stages:
  smoke:
    foreach: {local: ground, node8: local}
    do:
      cmd: python step.py smoke gates/${key}/smoke.json --metrics smoke-${key}.json
      params: [train.seed]
      outs: ["gates/${key}/smoke.json"]
      metrics: ["smoke-${key}.json": {cache: false}]
"""


def test_proofs_are_told_per_rung(project: Project) -> None:
    project.write(GATES)
    Path("gates/local").mkdir(parents=True)
    Path("gates/node8").mkdir(parents=True)
    assert project.run("dvc", "repro").returncode == 0
    assert "local  smoke not proved\n  node8  smoke not proved" in status_text()  # the toy's output is no verdict

    verdict = {"gate": "smoke", "rung": "local", "fingerprint": "0123456789abcdef"}
    Path("gates/local/smoke.json").unlink()
    write("gates/local/smoke.json", verdict)
    assert project.run("dvc", "commit", "-f").returncode == 0
    assert "local  smoke proved (0123456789ab)\n  node8  smoke not proved" in status_text()
    project.set_seed(2)
    assert "local  smoke proved (0123456789ab, not for the present state)" in status_text()


def test_results_are_summed_up_from_metrics_files(project: Project) -> None:
    project.write("""
stages:
  format: {cmd: 'true', metrics: [metrics/format.json: {cache: false}]}
  pack: {cmd: 'true', metrics: [metrics/pack.json: {cache: false}]}
  smoke: {cmd: 'true', metrics: [metrics/smoke.json: {cache: false}]}
  train: {cmd: 'true', metrics: [metrics/train.json: {cache: false}]}
  export: {cmd: 'true', outs: [models/export]}
  evaluate: {cmd: 'true', metrics: [metrics/evaluate.json: {cache: false}]}
""")
    assert "results" not in status_text()
    counts = {"in": 3000, "kept": 2400, "rejected": 60, "duplicate": 40, "left_out": 500}
    write("metrics/format.json", {f"rows_{key}": count for key, count in counts.items()})
    write("metrics/pack.json", {"fill": 0.99713, "sequences": 451})
    write(
        "metrics/smoke.json",
        {"checks": {"a": {"passed": True}, "mask": {"passed": False}}, "loss_first": 6.5, "loss_last": 3.25},
    )
    Path("metrics/train.json").write_text('{"loss_first": 6.')  # being written
    write(
        "metrics/evaluate.json",
        {"base": {"exact_match": 0.0, "stop_rate": 0.1}, "tuned": {"exact_match": 0.655, "stop_rate": 1.0}, "rows": 200},
    )
    write("models/export/config.json", {})
    results = status_text().split("\nresults\n")[1].splitlines()
    assert [line.split(maxsplit=1) for line in results] == [
        ["format", "rows 3,000 in, 2,400 kept, 60 rejected, 40 duplicate, 500 left out"],
        ["pack", "fill 99.71% of 451 sequences"],
        ["smoke", "1/2 checks passed, failed: mask; loss 6.500 -> 3.250"],
        ["evaluate", "held out: exact match 0.0% -> 65.5%, stop rate 10.0% -> 100.0% (200 rows)"],
        ["model", "models/export"],
    ]


def test_this_repository_is_told_whatever_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = status_text()
    assert all(f"\n  {node.name} " in text for node in dag.stages(None))
