"""How the project stands, told from its files: what is stale, running and proved, and what came out.

Contract: reads dvc.yaml and dvc.lock (through `dag`), verdicts, owner records and metrics files; never the state of an
orchestrator. A process is called running only if it lives: process id and start time, on this machine. Takes no lock.

Command: `ladder status`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.orchestration import dag

RUN_FLAGS = ("runs", "scratch")
"""Flags of a stage's command that name the folder with one folder per training run, which is no DVC output."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The owner record of a run folder, held against the processes of this machine."""

    fingerprint: str
    folder: Path
    host: str
    pid: int
    alive: bool | None
    """None: another host, which cannot be asked from here."""

    def __str__(self) -> str:
        if self.alive is None:
            return f"owned by process {self.pid} on {self.host}, not visible from here"
        return f"running, process {self.pid}" if self.alive else f"stopped, process {self.pid} is gone"


def status_text() -> str:
    """All of it as lines for a terminal."""
    nodes = dag.stages(None)
    trainers = find_trainers(nodes)
    states = stage_states(nodes, trainers)
    parts = {
        "stages": [(node.name, states[node.name]) for node in nodes],
        "proofs": list(_proofs(nodes, states)),
        "trainers": [(t.fingerprint[:12], str(t)) for t in trainers],
        "results": list(_results(nodes)),
    }
    return "\n\n".join(_block(title, lines) for title, lines in parts.items() if lines)


def stage_states(nodes: tuple[dag.StageNode, ...], trainers: tuple[Trainer, ...]) -> Mapping[str, str]:
    """Of each stage: `up to date`, `running ...`, `stopped ...`, or `stale: why`."""
    changes, claims = dag.all_changes(), dag.busy()
    states: dict[str, str] = {}
    for node in nodes:
        pid = claims.get(node.name)
        waiting = [need for need in node.needs if states[need] != "up to date"]
        if pid is not None and start_ticks(pid) is not None:
            states[node.name] = f"running, dvc process {pid}"
        elif not changes[node.name]:
            states[node.name] = f"stale: after {', '.join(waiting)}" if waiting else "up to date"
        elif _stopped(node, pid, trainers):
            states[node.name] = "stopped before its end; `ladder run` continues"
        else:
            states[node.name] = f"stale: {', '.join(changes[node.name])}"
    return states


def find_trainers(nodes: tuple[dag.StageNode, ...]) -> tuple[Trainer, ...]:
    """Owner records in the folders of runs that the stages' commands name."""
    found = [_trainer(owner) for folder in sorted(_run_folders(nodes)) for owner in sorted(folder.glob("*/owner.json"))]
    return tuple(t for t in found if t is not None)


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot (field 22 of /proc/PID/stat); None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        if not Path("/proc/self/stat").exists():  # no procfs: existence is all that can be told
            return 0 if _exists(pid) else None
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stopped(node: dag.StageNode, pid: int | None, trainers: tuple[Trainer, ...]) -> bool:
    """Whether its last run left a claim in DVC's records, or, of a stage that resumes, a run folder whose owner is gone."""
    folders = set(_run_folders((node,))) if node.retries else set[Path]()
    return pid is not None or any(t.alive is False and t.folder.parent in folders for t in trainers)


def _run_folders(nodes: tuple[dag.StageNode, ...]) -> set[Path]:
    return {Path(node.flags[flag]) for node in nodes for flag in RUN_FLAGS if flag in node.flags}


def _trainer(owner: Path) -> Trainer | None:
    record = _read(owner)
    try:
        host, pid, start = str(record["host"]), int(record["pid"]), int(record["start"])
    except (KeyError, TypeError, ValueError):
        return None
    alive = start_ticks(pid) == start if host == socket.gethostname() else None
    return Trainer(owner.parent.name, owner.parent, host, pid, alive)


def _proofs(nodes: tuple[dag.StageNode, ...], states: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Per item of a `foreach` group, the verdicts: an output `.../ITEM/GROUP.json` that holds gate, rung and fingerprint."""
    told: dict[str, list[str]] = {}
    for node in nodes:
        gate, _, rung = node.name.partition("@")
        for out in (Path(o) for o in node.outs if rung and Path(o).parts[-2:] == (rung, f"{gate}.json")):
            verdict = _read(out)
            if {"gate", "rung", "fingerprint"} <= verdict.keys():
                stale = "" if states[node.name] == "up to date" else ", not for the present state"
                told.setdefault(rung, []).append(f"{gate} proved ({str(verdict['fingerprint'])[:12]}{stale})")
            else:
                told.setdefault(rung, []).append(f"{gate} not proved")
    yield from ((rung, ", ".join(gates)) for rung, gates in told.items())


def _results(nodes: tuple[dag.StageNode, ...]) -> Iterator[tuple[str, str]]:
    """One line per metrics file that is there, in the order of the stages, then where the model lies."""
    for node in nodes:
        for path in node.metrics:
            metrics = _read(Path(path))
            text = "; ".join(filter(None, (_checks(metrics), _rows(metrics), _fill(metrics), _losses(metrics), _scores(metrics))))
            if text:
                yield node.name, text
    models = [out for node in nodes for out in node.outs if (Path(out) / "config.json").is_file()]
    if models:
        yield "model", models[-1]


def _rows(metrics: Mapping[str, Any]) -> str:
    words = {"in": "in", "kept": "kept", "rejected": "rejected", "duplicate": "duplicate", "left_out": "left out"}
    names = {f"rows_{key}": word for key, word in words.items()}
    told = [f"{metrics[key]:,} {word}" for key, word in names.items() if key in metrics]
    return f"rows {', '.join(told)}" if told else ""


def _fill(metrics: Mapping[str, Any]) -> str:
    return f"fill {metrics['fill']:.2%} of {metrics.get('sequences', '?')} sequences" if "fill" in metrics else ""


def _checks(metrics: Mapping[str, Any]) -> str:
    checks: Mapping[str, Mapping[str, Any]] = metrics.get("checks", {})
    if not checks:
        return ""
    failed = [name for name, check in checks.items() if not check.get("passed")]
    return f"{len(checks) - len(failed)}/{len(checks)} checks passed" + (f", failed: {', '.join(failed)}" if failed else "")


def _losses(metrics: Mapping[str, Any]) -> str:
    if "loss_first" not in metrics or "loss_last" not in metrics:
        return ""
    return f"loss {metrics['loss_first']:.3f} -> {metrics['loss_last']:.3f}"


def _scores(metrics: Mapping[str, Any]) -> str:
    base, tuned = metrics.get("base"), metrics.get("tuned")
    if not isinstance(base, dict) or not isinstance(tuned, dict):
        return ""
    names = {"exact_match": "exact match", "stop_rate": "stop rate"}
    told = [f"{word} {base[key]:.1%} -> {tuned[key]:.1%}" for key, word in names.items() if key in base and key in tuned]
    return f"held out: {', '.join(told)} ({metrics.get('rows', '?')} rows)"


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none to be read: being written, or broken, which is for its stage to tell."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _block(title: str, lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name.ljust(width)}  {text}" for name, text in lines)])
