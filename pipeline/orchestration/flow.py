"""The Prefect flow over DVC's graph: the only module that imports Prefect.

Contract: one task per stage of `dag.stages(target)`, one after the other, each a `dvc repro --single-item` in a process tree of
its own that ends with this process. DVC decides what is stale and is the only cache: Prefect's caching is off and results
are not persisted. Retries and time limits come from `meta` in dvc.yaml. A stage whose needs failed is not run and
says why; independent ones go on. TERM or INT ends the running stage, which has the grace time to save.

Command: `ladder run [TARGET]`, or a deployment of prefect.yaml. A plain `dvc repro` does the same work without Prefect.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed

from pipeline.config.errors import GateFailed, LadderError, Resumable, RunFailed, UserError
from pipeline.config.schema import load_params
from pipeline.launch.process import asked_to_stop, run_tree
from pipeline.orchestration import dag

RECORDS = Path(".prefect/stages")
"""Where a stage's process notes how it ended, for this process to read."""

FINAL = {error.exit_code: error for error in (UserError, GateFailed)}
"""Exit codes that another try would only repeat."""

Word = Literal["skipped", "restored", "ran", "failed", "stopped", "not run"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one stage."""

    stage: str
    word: Word
    reason: str
    seconds: float = 0.0
    exit_code: int = 0

    @property
    def good(self) -> bool:
        return self.word in ("skipped", "restored", "ran")


class StageFailed(Exception):
    """Carries the outcome of a failed try to Prefect, which may try again."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.stage} {outcome.word}: {outcome.reason}")
        self.outcome = outcome


def run(target: str | None, *, force: bool) -> None:
    """Run the flow here; raises the LadderError that says how it failed."""

    def on_term(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_term)  # outside of a stage; Prefect sends the signal again when its flow has ended
    try:
        ladder(target=target, force=force)
    except (TerminationSignal, KeyboardInterrupt):
        raise Resumable("stopped on request, nothing is left running; the same command continues") from None


def _run_name() -> str:
    """Commit and top rung, such as `3fa9c1d-dirty local`; `ungit` outside of a repository with a commit."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{described or 'ungit'} {load_params(Path('params.yaml')).ladder.top}"


@flow(name="ladder", flow_run_name=_run_name, persist_result=False)
def ladder(target: str | None = None, force: bool = False) -> None:
    """Run the stages `target` needs and itself, all stages without a target; `force` runs also what is unchanged."""
    outcomes: dict[str, Outcome] = {}
    for node in dag.stages(target):
        outcomes[node.name] = outcome = _settle(node, outcomes, force)
        _say(f"{outcome.stage}: {outcome.word}, {outcome.seconds:.1f} s{_after_colon(outcome.reason)}")
    rows = [_row(outcome) for outcome in outcomes.values()]
    if rows:
        create_table_artifact(key="ladder-stages", table=rows, description=f"Stages of `ladder run {target or ''}`".rstrip())
    _say(_table(rows) if rows else "no stages in dvc.yaml")
    if asked_to_stop():
        raise TerminationSignal(signal.SIGTERM)  # so that a run cancelled from outside ends as cancelled
    _raise_failure(outcomes.values())


def _settle(node: dag.StageNode, outcomes: Mapping[str, Outcome], force: bool) -> Outcome:
    """One stage as one task run, to its end."""
    started = time.monotonic()
    one = _stage.with_options(
        name=node.name, task_run_name=node.name, description=node.description, retries=node.retries, retry_delay_seconds=1
    )
    state: State[Any] = one(node, _obstacle(node, outcomes), force, return_state=True)
    told = state.result(raise_on_failure=False)
    if isinstance(told, StageFailed):
        told = told.outcome
    if not isinstance(told, Outcome):  # an error of ours or Prefect's
        told = Outcome(node.name, "failed", f"{type(told).__name__}: {told}", exit_code=1)
    return dataclasses.replace(told, seconds=time.monotonic() - started)


def _obstacle(node: dag.StageNode, outcomes: Mapping[str, Outcome]) -> str:
    """Why a stage is not to be run, or nothing."""
    if asked_to_stop():
        return "stopped on request"
    for need in node.needs:
        outcome = outcomes[need]
        if not outcome.good:
            return outcome.reason if outcome.word == "not run" else f"{outcome.stage} {outcome.word}"
    return ""


def _worth_another_try(_task: object, _run: object, state: State[Any]) -> bool:
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, StageFailed) and failure.outcome.exit_code not in FINAL and not asked_to_stop()


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_worth_another_try)
def _stage(node: dag.StageNode, obstacle: str, force: bool) -> State[Outcome]:
    if obstacle:
        return Cancelled(name="NotRun", message=obstacle, data=Outcome(node.name, "not run", obstacle))
    causes = ("forced",) if force else dag.changes(node.name)
    if not causes:
        outcome = Outcome(node.name, "skipped", "unchanged")
    else:
        _say(f"\n{node.name}: {_shortened(causes)}")
        outcome = _repro(node, causes, force)
    return Completed(name=outcome.word.capitalize(), message=outcome.reason, data=outcome)


def _repro(node: dag.StageNode, causes: tuple[str, ...], force: bool) -> Outcome:
    """Run one stage through DVC; raises StageFailed, its earlier outputs back in place."""
    record = RECORDS / f"{node.name}.json"
    command = dag.command(node.name, record, force=force)
    # Commands say `python`: the one this runs on comes first.
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    with dag.preserving(node.name):
        try:
            result = dag.result(record, run_tree(command, env=env, timeout=node.timeout))
        except TimeoutError:
            reason = f"ran longer than its limit of {node.timeout:.0f} s (meta.timeout in dvc.yaml)"
            raise StageFailed(Outcome(node.name, "failed", reason, exit_code=RunFailed.exit_code)) from None
        if asked_to_stop() and result.ending in ("failed", "stopped"):
            raise StageFailed(Outcome(node.name, "stopped", "stopped on request", exit_code=Resumable.exit_code))
        if result.ending in ("failed", "stopped"):
            saved = result.exit_code == Resumable.exit_code
            reason = "stopped after a save; the next run continues" if saved else result.reason
            raise StageFailed(Outcome(node.name, "failed", reason, exit_code=result.exit_code))
    if result.ending == "unchanged":  # DVC found it settled after all
        return Outcome(node.name, "skipped", "unchanged")
    return Outcome(node.name, "restored" if result.ending == "restored" else "ran", _shortened(causes))


def _raise_failure(outcomes: Iterable[Outcome]) -> None:
    """One line over all that failed; the exit code of the first."""
    failed = [o for o in outcomes if o.word == "failed"]
    if not failed:
        return
    kinds: dict[int, type[LadderError]] = {**FINAL, Resumable.exit_code: Resumable}
    waiting = [o.stage for o in outcomes if o.word == "not run"]
    rest = f"; not run because of it: {', '.join(waiting)}" if waiting else ""
    what = "; ".join(f"stage '{o.stage}' failed ({o.reason})" for o in failed)
    raise kinds.get(failed[0].exit_code, RunFailed)(f"{what}{rest}")


def _row(outcome: Outcome) -> dict[str, Any]:
    return {"stage": outcome.stage, "outcome": outcome.word, "seconds": round(outcome.seconds, 1), "reason": outcome.reason}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *([f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n" + "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _shortened(causes: tuple[str, ...]) -> str:
    more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
    return ", ".join(causes[:3]) + more


def _after_colon(reason: str) -> str:
    return f": {reason}" if reason else ""


def _say(text: str) -> None:
    print(text, flush=True)  # before the stage's own output, which does not pass through this process
