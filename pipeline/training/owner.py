"""Who works in a run folder: a second trainer is refused, a dead owner is not an owner.

Contract: `RUN/owner.json` holds host, pid and the process's start time (field 22 of /proc/PID/stat), since pids
are used again. On another host nothing can be looked up, so its record counts as alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.artifact import write_json
from pipeline.config.errors import LaunchError

RECORD = "owner.json"


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Hold a run folder; LaunchError while another process does."""
    run.mkdir(parents=True, exist_ok=True)
    owner = alive_owner(run)
    if owner is not None:
        raise LaunchError(
            f"{run}: process {owner['pid']} on {owner['host']} trains here; wait for it or end it "
            f"(if that host is gone, delete {run / RECORD})"
        )
    write_json(run / RECORD, {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_of(os.getpid())})
    try:
        yield
    finally:
        (run / RECORD).unlink(missing_ok=True)


def alive_owner(run: Path) -> dict[str, Any] | None:
    """The record of a process that still works in `run`, or None."""
    try:
        owner = json.loads((run / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if owner["host"] != socket.gethostname():
        return owner
    start = _start_of(owner["pid"])
    return owner if start is not None and start == owner["start"] else None


def _start_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None
