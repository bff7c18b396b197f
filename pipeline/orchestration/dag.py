"""DVC's graph as plain data, and one stage of it run: the only module that imports dvc.

Contract: names, edges, order, retries and timeouts come from `dvc.yaml` alone. Reading takes no lock, so
it works while a `dvc repro` trains. Running a stage is `dvc repro --single-item NAME` in a process of its own; it
waits for DVC's repository lock and never removes one. Everything is relative to the working
directory, which is the repository root.

Command: `python -m pipeline.orchestration.dag NAME RECORD [--force]` runs one stage as `ladder run` does and
writes to RECORD how it ended; its exit status is the stage's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage import PipelineStage, Stage
from dvc.stage.exceptions import StageCmdFailedError

from pipeline.artifact import read_json, write_json
from pipeline.config.errors import ConfigError
from pipeline.launch.process import end_own_tree

PIPELINE_FILE = Path("dvc.yaml")

Ending = Literal["unchanged", "restored", "ran", "failed", "stopped"]


@dataclasses.dataclass(frozen=True)
class StageNode:
    """One stage of the graph; of a `foreach` stage, one of its items (`NAME@ITEM`)."""

    name: str
    needs: tuple[str, ...]
    """Stages whose outputs it reads directly, in the order of dvc.yaml."""
    description: str
    retries: int
    """From `meta`: runs again so often after a failure; 0 where nothing is said."""
    timeout: float | None
    """From `meta`, seconds; None where nothing is said."""
    outs: tuple[str, ...]
    """Paths it writes, metrics left out."""
    metrics: tuple[str, ...]
    cmd: str

    @property
    def flags(self) -> Mapping[str, str]:
        """`--NAME VALUE` pairs of the command: where paths stand that are no outputs, such as the folder of runs."""
        words = shlex.split(self.cmd)
        return {a[2:]: b for a, b in itertools.pairwise(words) if a.startswith("--") and not b.startswith("--")}


@dataclasses.dataclass(frozen=True)
class Result:
    """How one run of a stage ended."""

    ending: Ending
    exit_code: int
    """The stage's own, where its command ran; 0 where it had nothing to do; else DVC's."""
    reason: str


def stages(target: str | None) -> tuple[StageNode, ...]:
    """The stages `target` needs and itself, each after what it needs; all stages for None.

    A target is a stage or the name of a `foreach` group. Raises ConfigError for another name or an unreadable dvc.yaml.
    """
    with _project() as repo:
        nodes = _nodes(repo)
    if target is None:
        return tuple(nodes.values())
    wanted = [n for n in nodes if target in (n, n.partition("@")[0])]
    if not wanted:
        names = list(dict.fromkeys([*nodes, *(n.partition("@")[0] for n in nodes)]))
        close = difflib.get_close_matches(target, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(n) for n in close)}?" if close else f"there are: {', '.join(names) or 'none'}"
        raise ConfigError(f"'{target}': no such stage in {PIPELINE_FILE}; {hint}")
    needed: set[str] = set()
    while wanted:
        name = wanted.pop()
        needed.add(name)
        wanted.extend(n for n in nodes[name].needs if n not in needed)
    return tuple(node for name, node in nodes.items() if name in needed)


def changes(name: str) -> tuple[str, ...]:
    """Why a stage is stale, one line per cause; empty if it is up to date with the files it reads and writes."""
    return all_changes()[name]


def all_changes() -> Mapping[str, tuple[str, ...]]:
    """`changes` of every stage from one reading. A stage whose inputs will change when another one runs is not stale yet."""
    with _project() as repo:
        return {_name(stage): tuple(_changes(stage)) for stage in _pipeline_stages(repo)}


def busy() -> Mapping[str, int]:
    """Stages whose outputs a `dvc` process has claimed, and its process id, alive or not: DVC's own lock records, unlocked."""
    try:
        claims: dict[str, dict[str, Any]] = json.loads(Path(".dvc/tmp/rwlock").read_text(encoding="utf-8")).get("write", {})
    except (OSError, ValueError):  # none yet, or just being rewritten
        return {}
    pids = {os.path.relpath(path): int(claim["pid"]) for path, claim in claims.items()}
    return {node.name: pids[out] for node in stages(None) for out in (*node.outs, *node.metrics) if out in pids}


@contextlib.contextmanager
def preserving(name: str) -> Iterator[None]:
    """Put a stage's earlier outputs back if its run, inside, raises: DVC deletes them before the command starts.

    Cached outputs come from DVC's cache as dvc.lock has them, in place of what the failed run left; uncached ones are kept in
    memory (they are small: metrics, curves) and written back only where the run left none.
    """
    with _project() as repo:
        stage = _stage(repo, name)
        uncached = [Path(out.def_path) for out in stage.outs if not out.use_cache]
        kept = {path: path.read_bytes() for path in uncached if path.is_file()}
    try:
        yield
    except BaseException:
        _check_out(name)
        for path, content in kept.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        raise


def command(name: str, record: Path, *, force: bool) -> list[str]:
    """The command line that runs one stage; `result` reads `record` afterwards."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    return [sys.executable, "-m", "pipeline.orchestration.dag", name, str(record), *(["--force"] if force else [])]


def result(record: Path, status: int) -> Result:
    """How a `command` ended that returned `status` (negative: the signal that ended it)."""
    if not record.is_file():
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        return Result("failed", status, f"its dvc process ended without a word ({how})")
    return Result(**read_json(record, "the record of a stage's run"))


@contextlib.contextmanager
def _project() -> Iterator[Repo]:
    if not PIPELINE_FILE.is_file():
        raise ConfigError(f"{PIPELINE_FILE}: no such file in {Path.cwd()}; run from the root of the repository")
    try:
        # Waiting concerns only what takes the lock at all, here a checkout.
        with Repo(_wait_for_lock=True) as repo:
            yield repo
    except DvcException as error:
        raise ConfigError(f"{PIPELINE_FILE}: {_one_line(error)}") from error


def _pipeline_stages(repo: Repo) -> list[PipelineStage]:
    """The stages that run a command, in the order of dvc.yaml; files added by `dvc add` are in the graph, but no stages."""
    return [s for s in repo.index.stages if isinstance(s, PipelineStage) and s.cmd]


def _name(stage: Stage) -> str:
    return str(stage.addressing)


def _stage(repo: Repo, name: str) -> PipelineStage:
    return next(s for s in _pipeline_stages(repo) if _name(s) == name)


def _nodes(repo: Repo) -> dict[str, StageNode]:
    """Every node, each after what it needs, otherwise as in dvc.yaml; DVC has refused cycles."""
    graph = repo.index.graph
    order = {_name(stage): stage for stage in _pipeline_stages(repo)}
    upstream = {name: {_name(s) for s in graph.successors(stage)} for name, stage in order.items()}
    placed: dict[str, StageNode] = {}

    def place(name: str) -> None:
        if name not in placed:
            needs = tuple(n for n in order if n in upstream[name])
            for need in needs:
                place(need)
            placed[name] = _node(order[name], needs)

    for name in order:
        place(name)
    return placed


def _node(stage: PipelineStage, needs: tuple[str, ...]) -> StageNode:
    name, meta = _name(stage), stage.meta or {}
    retries, timeout = meta.get("retries", 0), meta.get("timeout")
    if not isinstance(retries, int) or retries < 0:
        raise ConfigError(f"{PIPELINE_FILE}: {name}.meta.retries = {retries!r}: a whole number from 0 on")
    if timeout is not None and (not isinstance(timeout, int | float) or timeout <= 0):
        raise ConfigError(f"{PIPELINE_FILE}: {name}.meta.timeout = {timeout!r}: seconds above 0")
    return StageNode(
        name=name,
        needs=needs,
        description=stage.short_description() or "",
        retries=retries,
        timeout=timeout,
        outs=tuple(o.def_path for o in stage.outs if not o.metric),
        metrics=tuple(o.def_path for o in stage.outs if o.metric),
        cmd="\n".join(stage.cmd) if isinstance(stage.cmd, list) else str(stage.cmd),
    )


def _changes(stage: PipelineStage) -> Iterator[str]:
    """What DVC's own check looks at, entry by entry: `Stage.status` takes read locks, which a running stage refuses."""
    if not any(entry.hash_info for entry in (*stage.deps, *stage.outs)):
        yield "never ran"
        return
    if stage.is_callback or stage.always_changed:
        yield "always runs"
    if stage.changed_stage():
        yield "command changed"
    for entry in (*([] if stage.frozen else stage.deps), *stage.outs):
        for path, what in entry.status().items():
            if isinstance(what, dict):  # a params file: what changed, by key
                yield from (f"{key} {verb}" for key, verb in what.items())
            else:
                yield f"{path} {what}"


def _check_out(name: str) -> None:
    with _project() as repo:
        cached = [out.def_path for out in _stage(repo, name).outs if out.use_cache and out.hash_info]
        if cached:
            with contextlib.suppress(DvcException):  # no longer in the cache: the failure itself is the news
                repo.checkout(targets=cached, force=True, allow_missing=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text if len(text) <= 300 else text[:297] + "..."


class _Witness(logging.Handler):
    """Hears DVC's log: which way a stage took, and the status of a command that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.ending: Ending = "unchanged"
        self.exit_code: int | None = None
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = str(record.msg)
        if message.startswith("Running stage"):
            self.ending = "ran"
        elif "is cached - skipping run" in message:
            self.ending = "restored"
        error = record.exc_info[1] if record.exc_info else None
        causes: list[BaseException] = []
        while error is not None and error not in causes:
            causes.append(error)
            error = error.__cause__ or error.__context__
        for cause in causes:
            self.reason = _one_line(cause) or self.reason  # the innermost one speaks
            status = re.search(r"exited with (-?\d+)$", str(cause)) if isinstance(cause, StageCmdFailedError) else None
            if status:
                self.exit_code, self.reason = int(status[1]), _explain(int(status[1]))
                return


def _explain(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit {status}, its message stands above"


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Make TERM wait for the running command, which gets one too, so that DVC learns how it ended and frees its records.

    Whoever started this process sends TERM to its whole tree, and KILL after the grace time. If that one is gone, the kernel
    sent this TERM (PR_SET_PDEATHSIG), and both fall to us. It may send it while the last threads of that one still end and it
    passes for alive, so its process id is watched from then on.
    """
    asked, finished = threading.Event(), threading.Event()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not finished.wait(0.1):
            pass
        if os.getppid() != parent:
            end_own_tree()

    def on_term(_signum: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            return
        asked.set()
        threading.Thread(target=watch).start()
        if not _has_children():
            raise KeyboardInterrupt  # DVC is hashing or waiting for its lock: nothing to save

    signal.signal(signal.SIGTERM, on_term)
    try:
        yield asked
    finally:
        finished.set()


def _repro(name: str, *, force: bool) -> Result:
    """`dvc repro --single-item NAME` here; its output is DVC's and the stage's own."""
    from dvc.cli import main as dvc

    witness = _Witness()
    logging.getLogger("dvc").addHandler(witness)
    sys.argv = ["dvc", "repro", "--single-item", name]  # what another DVC shows as the one that blocks it
    with _stopping() as asked:
        # Others hold the lock for moments, `dvc status` for example; DVC alone gives up after 3 s, even after hours of work.
        status = dvc(["--wait-for-lock", *sys.argv[1:], *(["--force"] if force else [])])
    if status == 0:
        return Result(witness.ending, 0, "")
    code = status if witness.exit_code is None else witness.exit_code
    if asked.is_set():
        return Result("stopped", code, "stopped on request")
    return Result("failed", code, witness.reason or f"dvc ended with status {status}")


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.orchestration.dag", description="Run one stage.", allow_abbrev=False
    )
    parser.add_argument("name")
    parser.add_argument("record", type=Path)
    parser.add_argument("--force", action="store_true", help="run it although nothing changed")
    arguments = parser.parse_args()
    outcome = _repro(arguments.name, force=arguments.force)
    write_json(arguments.record, dataclasses.asdict(outcome))
    return outcome.exit_code if outcome.exit_code >= 0 else 128 - outcome.exit_code


if __name__ == "__main__":
    sys.exit(_main())
