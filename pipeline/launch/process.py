"""A child process whose whole tree ends with it, and with us.

Contract: `run_tree` starts a command in a session of its own and returns its exit status. Whatever
happens to the caller, nothing of the tree is left: on TERM or INT to the caller the group gets
TERM, then `grace` seconds, then KILL; if the caller is killed, the kernel sends the child TERM
(PR_SET_PDEATHSIG, Linux). Descendants that made sessions of their own, as torchrun's workers do, are found
through /proc by the token in their environment and ended in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

TOKEN = "LADDER_TREE"
"""Environment variable that marks every process of a tree; nested trees append theirs."""

GRACE_SECONDS = 60.0
"""Between TERM and KILL: a rank finishes its step and saves in this time."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends; elsewhere than on Linux, do nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def run_tree(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    output: Path | None = None,
) -> int:
    """Run `command` to its end and return its exit status (negative: ended by that signal).

    A TERM or INT to this process reaches the tree as TERM and the call still returns the child's
    status; `asked_to_stop()` tells afterwards. `timeout` seconds bound the run: then the tree is
    ended and TimeoutError raised. `output`: a file that takes what the tree prints, instead of the terminal.
    """
    token = uuid.uuid4().hex
    marks = f"{env.get(TOKEN, '')}:{token}"
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork
    parent = os.getpid()

    def before_exec() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before the kernel was asked
                os._exit(143)

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output is not None else None
        child = subprocess.Popen(
            command,
            env={**env, TOKEN: marks},
            start_new_session=True,
            preexec_fn=before_exec,
            stdout=file,
            stderr=subprocess.STDOUT if file is not None else None,
        )
    try:
        with _forwarding(child, token, grace):
            try:
                return child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"'{' '.join(command[:5])} ...' ran longer than {timeout:.0f} s") from None
    finally:
        end_tree(child, token, grace)


def end_tree(child: subprocess.Popen[bytes] | None, token: str, grace: float) -> None:
    """End what is left of a tree: TERM, wait, KILL. Returns when nothing of it runs."""
    if not _signal_tree(child, token, signal.SIGTERM):
        return
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        if not _members(child, token):
            return
        time.sleep(0.1)
    while _signal_tree(child, token, signal.SIGKILL):
        time.sleep(0.05)


def end_own_tree(grace: float = GRACE_SECONDS) -> None:
    """End the rest of the tree this process was started in by `run_tree`: for when the one who started it is gone."""
    token = os.environ.get(TOKEN, "").rpartition(":")[2]
    if token:
        end_tree(None, token, grace)


_stop_signal: int | None = None


def asked_to_stop() -> bool:
    """Whether this process got TERM or INT while a tree ran."""
    return _stop_signal is not None


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen[bytes], token: str, grace: float) -> Iterator[None]:
    """Turn TERM and INT to this process into TERM to the tree, and KILL after the grace time."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a thread cannot have handlers; its process's main thread forwards
        return

    def forward(signum: int, _frame: FrameType | None) -> None:
        global _stop_signal
        if _stop_signal is None:  # TERM once: a second one could interrupt the save it asked for
            _stop_signal = signum
            threading.Thread(target=end_tree, args=(child, token, grace), daemon=True).start()

    before = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _members(child: subprocess.Popen[bytes] | None, token: str) -> list[int]:
    """Process ids of the tree that still run, the child's own first; zombies are not counted."""
    found = [] if child is None or child.poll() is not None else [child.pid]
    if sys.platform != "linux":
        return found
    needle = token.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (*found, os.getpid()):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if needle in (entry / "environ").read_bytes() and _state(entry) != "Z":
                found.append(int(entry.name))
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def _signal_tree(child: subprocess.Popen[bytes] | None, token: str, signum: int) -> bool:
    members = _members(child, token)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return bool(members)
