"""`ladder run` on real repositories: what runs, what is skipped and why, failures, retries, and ends by signal.

Most runs share one Prefect server, which is also asked what it was told. The runs ended by signals start their own, as
`ladder run` does without PREFECT_API_URL: it must not survive either.
"""

from __future__ import annotations

import ast
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.orchestration.toy import ROOT, Project, Server, wait_for

pytestmark = pytest.mark.e2e

RUN = ("pipeline.cli", "run")


def table(output: str) -> dict[str, tuple[str, str]]:
    """Stage -> (outcome, reason) from the table `ladder run` ends with."""
    lines = output[output.index("\nstage ") :].strip().splitlines()[1:]
    cells = [re.split(r"\s{2,}", line) for line in lines]
    return {cell[0]: (cell[1], cell[3]) for cell in cells}


def test_first_run_second_run_and_a_value_changed_back(project: Project, server: Server) -> None:
    project.write("""
stages:
  first: {cmd: python step.py first first.txt, outs: [first.txt]}
  left: {cmd: python step.py left left.txt first.txt, deps: [first.txt], params: [train.seed], outs: [left.txt]}
  prove:
    foreach: ${ladder.rungs}
    do: {cmd: "python step.py prove prove-${key}.txt first.txt", deps: [first.txt], outs: ["prove-${key}.txt"]}
  last: {cmd: python step.py last last.txt left.txt prove-local.txt, deps: [left.txt, prove-local.txt], outs: [last.txt]}
""")
    done = project.run(*RUN, PREFECT_API_URL=server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(table(done.stdout).values()) == {("ran", "never ran")}
    assert list(table(done.stdout)) == ["first", "left", "prove@local", "last"]
    assert project.text("last.txt") == "last(left(first()),prove(first()))"
    assert "> python step.py left" in done.stdout  # DVC's own output, live

    newest = server.ask("flow_runs")[0]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (newest["name"], newest["state"]["type"]) == (f"{head} local", "COMPLETED")
    wait_for(lambda: len(server.ask("task_runs")) >= 4, "the server has the task runs")
    tasks = {t["name"]: t["state"]["name"] for t in server.ask("task_runs") if t["flow_run_id"] == newest["id"]}
    assert tasks == dict.fromkeys(["first", "left", "prove@local", "last"], "Ran")
    artifact = next(a for a in server.ask("artifacts") if a["flow_run_id"] == newest["id"])
    assert artifact["type"] == "table"
    assert '"stage": "prove@local"' in artifact["data"]

    again = project.run(*RUN, PREFECT_API_URL=server.url)
    assert again.returncode == 0
    assert set(table(again.stdout).values()) == {("skipped", "unchanged")}
    assert len(project.runs) == 4

    project.set_seed(2)
    changed = table(project.run(*RUN, "left", PREFECT_API_URL=server.url).stdout)
    assert changed == {"first": ("skipped", "unchanged"), "left": ("ran", "train.seed modified")}
    project.set_seed(1)
    back = table(project.run(*RUN, PREFECT_API_URL=server.url).stdout)
    assert back["left"] == ("restored", "train.seed modified")
    assert back["last"] == ("skipped", "unchanged")
    assert len(project.runs) == 5


def test_failures_retries_and_limits(project: Project, server: Server) -> None:
    """One run with everything that can go wrong in a stage: what depends on it is not run, what does not goes on."""
    project.write("""
stages:
  source: {cmd: python step.py source source.txt, params: [train.seed], outs: [source.txt]}
  gate: {cmd: python step.py gate gate.txt source.txt --metrics gate.json, params: [train.seed],
         deps: [source.txt], outs: [gate.txt], metrics: [gate.json: {cache: false}], meta: {retries: 2}}
  after: {cmd: python step.py after after.txt gate.txt, deps: [gate.txt], outs: [after.txt]}
  later: {cmd: python step.py later later.txt after.txt, deps: [after.txt], outs: [later.txt]}
  flaky: {cmd: python step.py flaky flaky.txt, params: [train.seed], outs: [flaky.txt], meta: {retries: 2}}
  plain: {cmd: python step.py plain plain.txt, params: [train.seed], outs: [plain.txt]}
  slow: {cmd: python step.py slow slow.txt, params: [train.seed], outs: [slow.txt], meta: {timeout: 2}}
""")
    assert project.run("dvc", "repro").returncode == 0
    before = len(project.runs)
    project.set_seed(2)
    project.order("gate", "3")
    project.order("flaky", "once 3 1")  # its runs 2 and 3 fail
    project.order("plain", "once 2 1")
    project.order("slow", "sleep")
    done = project.run(*RUN, PREFECT_API_URL=server.url)

    outcome = table(done.stdout)
    assert outcome["source"] == ("ran", "train.seed modified")
    assert outcome["gate"] == ("failed", "exit 3, its message stands above")
    assert outcome["after"] == outcome["later"] == ("not run", "gate failed")
    assert outcome["flaky"] == ("ran", "train.seed modified")
    assert outcome["plain"] == ("failed", "exit 1, its message stands above")
    assert outcome["slow"] == ("failed", "ran longer than its limit of 2 s (meta.timeout in dvc.yaml)")
    # A gate's answer is no accident: not tried again although `meta` allows it. Without `meta` nothing is.
    runs = project.runs[before:]
    assert {n: runs.count(n) for n in outcome} == {
        "source": 1, "gate": 1, "after": 0, "later": 0, "flaky": 3, "plain": 1, "slow": 1
    }  # fmt: skip

    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ladder: ")]
    assert "stage 'gate' failed (exit 3" in line
    assert line.endswith("not run because of it: after, later")
    assert "Traceback" not in done.stdout + done.stderr
    # What stood there before the failed runs stands there again.
    assert project.text("gate.txt") == "gate(source())"
    assert project.text("gate.json") == '{"of": "gate"}'
    assert project.text("slow.txt") == "slow()"
    assert Path("saved-slow").exists()
    assert project.alive() == {}

    newest = server.ask("flow_runs")[0]
    assert newest["state"]["type"] == "FAILED"
    wait_for(lambda: len([t for t in server.ask("task_runs") if t["flow_run_id"] == newest["id"]]) == 7, "all task runs")
    states = {t["name"]: t["state"]["name"] for t in server.ask("task_runs") if t["flow_run_id"] == newest["id"]}
    assert states["later"] == "NotRun"
    assert states["gate"] == "Failed"


LONG = """
stages:
  first: {cmd: python step.py first first.txt, outs: [first.txt]}
  train: {cmd: python step.py train train.txt first.txt, params: [train.seed], deps: [first.txt], outs: [train.txt],
          meta: {retries: 2}}
  last: {cmd: python step.py last last.txt train.txt, deps: [train.txt], outs: [last.txt]}
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_mid_train_saves_ends_everything_and_continues(
    project: Project, server: Server, signum: signal.Signals
) -> None:
    project.write(LONG)
    assert project.run("dvc", "repro").returncode == 0
    project.set_seed(2)
    project.order("train", "sleep")
    server.give_database(project)
    own_server = {} if signum == signal.SIGTERM else {"PREFECT_API_URL": server.url}
    process = project.start(*RUN, **own_server)
    wait_for(Path("sleeping-train").exists, "the stage runs")
    assert any("uvicorn" in command for command in project.alive().values()) == (signum == signal.SIGTERM)

    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert project.alive() == {}
    assert project.text("saved-train") == "1"
    assert process.returncode == 75
    assert err.strip().splitlines()[-1] == "ladder: stopped on request, nothing is left running; the same command continues"
    outcome = table(out)
    assert outcome["train"] == ("stopped", "stopped on request")
    assert outcome["last"] == ("not run", "stopped on request")
    assert project.runs.count("train") == 2  # not tried again
    assert project.text("train.txt") == "train(first())"  # the earlier result

    if signum == signal.SIGINT:
        project.order("train", None)
        again = project.run(*RUN, PREFECT_API_URL=server.url)
        assert again.returncode == 0
        assert table(again.stdout)["train"] == ("ran", "train.seed modified")


def test_killed_flow_takes_everything_with_it(project: Project, server: Server) -> None:
    server.give_database(project)
    project.write(LONG)
    project.order("train", "sleep")
    process = project.start(*RUN)
    wait_for(Path("sleeping-train").exists, "the stage runs")
    assert any("uvicorn" in command for command in project.alive().values())

    process.kill()
    process.wait()
    wait_for(lambda: not project.alive(), "all processes gone")
    assert project.text("saved-train") == "1"


def test_an_absent_server_is_one_line_and_touches_nothing(project: Project) -> None:
    project.write(LONG)
    done = project.run(*RUN, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("ladder: PREFECT_API_URL = http://127.0.0.1:9/api: no server answers there;")
    assert project.runs == []


def test_no_stage_name_in_the_flow() -> None:
    dvc_yaml = (ROOT / "dvc.yaml").read_text()
    names = set(re.findall(r"^  (\w+):$", dvc_yaml, re.MULTILINE))
    assert {"train", "smoke"} <= names
    tree = ast.parse((ROOT / "pipeline/orchestration/flow.py").read_text())
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not names & constants


def test_one_importer_of_each_engine() -> None:
    importers: dict[str, set[str]] = {"dvc": set(), "prefect": set()}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import | ast.ImportFrom):
                for engine in importers.keys() & {m.partition(".")[0] for m in modules}:
                    importers[engine].add(path.name)
    assert importers == {"dvc": {"dag.py"}, "prefect": {"flow.py"}}
