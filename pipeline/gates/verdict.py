"""Checks, verdicts, and what a verdict is good for.

Contract: a verdict has fixed content, gate, rung and fingerprint of what was proven, so that proving the same again
changes nothing downstream; measurements go to metrics. A check that fails ends the gate with its name, value, limit and
what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import read_json, write_json
from pipeline.config.errors import GateFailed

GATES = ("smoke", "resume")


@dataclass(frozen=True)
class Check:
    """One measured value with its limit; `advice` says what a failure means and what to look at."""

    name: str
    value: float
    limit: float
    passed: bool
    advice: str


def at_most(name: str, value: float, limit: float, advice: str) -> Check:
    """A check that passes when the value is finite and not above the limit."""
    return Check(name, value, limit, math.isfinite(value) and value <= limit, advice)


def at_least(name: str, value: float, limit: float, advice: str) -> Check:
    """A check that passes when the value is finite and not below the limit."""
    return Check(name, value, limit, math.isfinite(value) and value >= limit, advice)


def as_metrics(checks: Sequence[Check]) -> dict[str, dict[str, float | bool | None]]:
    """Checks as metrics files show them; a value that is not finite becomes null."""
    return {c.name: {"value": c.value if math.isfinite(c.value) else None, "limit": c.limit, "passed": c.passed} for c in checks}


def judge(gate: str, rung: str, checks: Sequence[Check], report: Path) -> None:
    """Write all checks to `report`, to be read after a failure; GateFailed names the first that failed, and the others."""
    write_json(report, as_metrics(checks))
    failed = [c for c in checks if not c.passed]
    if not failed:
        return
    first = failed[0]
    others = f"; also failed: {', '.join(c.name for c in failed[1:])}" if failed[1:] else ""
    raise GateFailed(
        f"{gate}@{rung} failed at check {first.name}: value {first.value:.6g}, limit {first.limit:.6g}; {first.advice}"
        f"{others}; all checks: {report}"
    )


def write_verdict(path: Path, gate: str, rung: str, fingerprint: str) -> None:
    write_json(path, {"gate": gate, "rung": rung, "fingerprint": fingerprint})


def require(path: Path, fingerprint: str) -> None:
    """GateFailed unless the verdict at `path` proves exactly this run; the ground below the first rung proves nothing
    and asks nothing."""
    verdict = read_json(path, "the verdict of the gate before")
    if verdict["gate"] != "ground" and verdict["fingerprint"] != fingerprint:
        raise GateFailed(
            f"{path}: proves run {verdict['fingerprint'][:12]}, this one is {fingerprint[:12]}; code, data or parameters "
            f"changed since: run `dvc repro {verdict['gate']}@{verdict['rung']}`"
        )
