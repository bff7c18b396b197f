"""DVC's graph as plain data, from real repositories: empty, single, chain, diamond, foreach; reading while a stage runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.orchestration import dag
from tests.orchestration.toy import ROOT, Project, wait_for

DIAMOND = """
stages:
  last: {cmd: python step.py last last.txt left.txt right.txt, deps: [left.txt, right.txt], outs: [last.txt]}
  right: {cmd: python step.py right right.txt first.txt, deps: [first.txt], outs: [right.txt]}
  left: {cmd: python step.py left left.txt first.txt, deps: [first.txt], outs: [left.txt]}
  first: {cmd: python step.py first first.txt, params: [train.seed], outs: [first.txt]}
"""

pytestmark = pytest.mark.unit


def names(target: str | None = None) -> list[str]:
    return [node.name for node in dag.stages(target)]


def test_no_stage_gives_no_node(project: Project) -> None:
    project.write("stages: {}\n")
    assert dag.stages(None) == ()


def test_single_stage_carries_what_dvc_yaml_says(project: Project) -> None:
    project.write("""
stages:
  one:
    desc: The only one
    cmd: python step.py one out/one.txt --runs scratch/runs --quick --metrics m.json
    outs: [one.txt, {curve.jsonl: {cache: false}}]
    metrics: [m.json: {cache: false}]
    meta: {retries: 2, timeout: 90, owner: nobody}
""")
    (node,) = dag.stages(None)
    assert node == dag.StageNode(
        name="one",
        needs=(),
        description="The only one",
        retries=2,
        timeout=90,
        outs=("one.txt", "curve.jsonl"),
        metrics=("m.json",),
        cmd="python step.py one out/one.txt --runs scratch/runs --quick --metrics m.json",
    )
    assert node.flags == {"runs": "scratch/runs", "metrics": "m.json"}


def test_without_meta_nothing_is_retried_or_limited(project: Project) -> None:
    project.write("stages:\n  one: {cmd: 'true', outs: [one.txt]}\n")
    (node,) = dag.stages(None)
    assert (node.retries, node.timeout, node.description) == (0, None, "")


def test_diamond_in_execution_order_with_direct_needs(project: Project) -> None:
    project.write(DIAMOND)
    nodes = {node.name: node for node in dag.stages(None)}
    assert list(nodes) == ["first", "right", "left", "last"]  # what is needed first; else the order of dvc.yaml
    assert nodes["last"].needs == ("right", "left")
    assert nodes["left"].needs == nodes["right"].needs == ("first",)


def test_target_takes_what_it_needs_and_no_more(project: Project) -> None:
    project.write(DIAMOND)
    assert names("left") == ["first", "left"]
    assert names("first") == ["first"]


def test_foreach_items_are_nodes_and_the_group_is_a_target(project: Project) -> None:
    project.write("""
stages:
  prove:
    foreach: {low: first.txt, high: low.txt}
    do: {cmd: "python step.py ${key} ${key}.txt ${item}", deps: ["${item}"], outs: ["${key}.txt"]}
  first: {cmd: python step.py first first.txt, outs: [first.txt]}
  after: {cmd: python step.py after after.txt high.txt, deps: [high.txt], outs: [after.txt]}
""")
    assert names() == ["first", "prove@low", "prove@high", "after"]
    assert names("prove") == ["first", "prove@low", "prove@high"]
    assert names("prove@low") == ["first", "prove@low"]


def test_this_repository_is_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    nodes = dag.stages(None)
    assert len(nodes) >= 8
    for index, node in enumerate(nodes):
        assert set(node.needs) <= {earlier.name for earlier in nodes[:index]}
        assert node.timeout
        assert node.description


@pytest.mark.parametrize(
    ("dvc_yaml", "target", "message"),
    [
        (DIAMOND, "rihgt", "'rihgt': no such stage in dvc.yaml; did you mean 'right'?"),
        (DIAMOND, "zzzz", "there are: first, right, left, last"),
        ("stages: {}\n", "x", "there are: none"),
        ("stages:\n  a: {cmd: 'true', outs: [a], meta: {retries: -1}}\n", None, "a.meta.retries = -1"),
        ("stages:\n  a: {cmd: 'true', outs: [a], meta: {timeout: soon}}\n", None, "a.meta.timeout = 'soon'"),
        ("stages:\n  a: {cmd: 'true', deps: [b], outs: [a]}\n  b: {cmd: 'true', deps: [a], outs: [b]}\n", None, "Same item(s)"),
        ("stages:\n  a: {command: 'true'}\n", None, "dvc.yaml"),
        ("stages: [\n", None, "dvc.yaml"),
    ],
)
def test_a_wrong_target_or_file_is_one_line(project: Project, dvc_yaml: str, target: str | None, message: str) -> None:
    project.write(dvc_yaml)
    with pytest.raises(ConfigError) as caught:
        dag.stages(target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run from the root"):
        dag.stages(None)


def test_changes_name_the_cause_and_end_with_a_run(project: Project) -> None:
    project.write(DIAMOND)
    assert dag.changes("first") == ("never ran",)
    assert project.run("dvc", "repro").returncode == 0
    assert set(dag.all_changes().values()) == {()}

    project.set_seed(2)
    assert dag.changes("first") == ("train.seed modified",)
    assert dag.changes("left") == ()  # its input is still the old one
    Path("left.txt").unlink()
    assert dag.changes("left") == ("left.txt deleted",)
    assert dag.changes("last") == ("left.txt deleted",)
    project.write(DIAMOND.replace("step.py right right.txt", "step.py right  right.txt"))
    assert dag.changes("right") == ("command changed",)


def test_one_stage_run_as_ladder_does_records_its_own_end(project: Project) -> None:
    project.write(DIAMOND)
    record = project.root / "records/first.json"

    def run(*, force: bool = False) -> tuple[int, dag.Result]:
        command = dag.command("first", record, force=force)
        assert command[:2] == [sys.executable, "-m"]
        status = project.run(*command[2:]).returncode
        return status, dag.result(record, status)

    assert run() == (0, dag.Result("ran", 0, ""))
    assert run() == (0, dag.Result("unchanged", 0, ""))
    project.set_seed(2)
    assert run()[1].ending == "ran"
    project.set_seed(1)
    assert run()[1].ending == "restored"
    assert project.runs == ["first"] * 2
    assert run(force=True)[1].ending == "ran"
    project.order("first", "3")
    assert run(force=True) == (3, dag.Result("failed", 3, "exit 3, its message stands above"))


def test_what_dvc_itself_refuses_is_its_reason(project: Project) -> None:
    project.write(DIAMOND)
    record = project.root / "records/last.json"
    status = project.run(*dag.command("last", record, force=False)[2:]).returncode
    result = dag.result(record, status)
    assert result.ending == "failed"
    assert "left.txt" in result.reason
    assert status != 0


def test_a_process_that_left_no_record_failed(tmp_path: Path) -> None:
    assert dag.result(tmp_path / "none.json", -9) == dag.Result("failed", -9, "its dvc process ended without a word (SIGKILL)")


def test_a_failed_run_gets_its_earlier_outputs_back(project: Project) -> None:
    project.write("""
stages:
  one:
    cmd: python step.py one one.txt --metrics one.json
    params: [train.seed]
    outs: [one.txt]
    metrics: [one.json: {cache: false}]
""")
    assert project.run("dvc", "repro").returncode == 0
    project.set_seed(2)
    project.order("one", "1")

    def failing_run() -> None:
        with dag.preserving("one"):
            assert project.run("dvc", "repro").returncode != 0
            assert project.text("one.txt") == "broken"
            assert not Path("one.json").exists()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing_run()
    assert project.text("one.txt") == "one()"
    assert json.loads(project.text("one.json")) == {"of": "one"}


def test_reading_works_while_a_stage_runs(project: Project) -> None:
    project.write(DIAMOND)
    project.order("right", "sleep")
    running = project.start("dvc", "repro", "right")
    wait_for(Path("sleeping-right").exists, "the stage runs")

    assert names("last") == ["first", "right", "left", "last"]
    assert dag.changes("first") == ()
    assert dag.changes("left") == ("never ran",)
    assert dag.busy() == {"right": running.pid}

    record = project.root / "records/right.json"  # a second run of it is refused, and says by whom
    status = project.run(*dag.command("right", record, force=False)[2:]).returncode
    result = dag.result(record, status)
    assert result.ending == "failed"
    assert str(running.pid) in result.reason
    assert project.runs == ["first", "right"]
