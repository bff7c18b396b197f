"""Process trees that end with their caller.

Would catch: a rank or its helper that goes on after its trainer was stopped, timed out or killed; a save that is cut off
by a KILL that came too early; a status that is lost. Every process of a test carries a mark in its environment, so that
survivors are found in whatever session they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.launch.process import TOKEN, asked_to_stop, run_tree
from tests.workspace import ROOT

pytestmark = [pytest.mark.unit, pytest.mark.skipif(sys.platform != "linux", reason="trees are found through /proc")]

PATIENCE = 30.0
"""Seconds after which a wait is a failure; nothing here takes that long."""

# A rank's helper in a session of its own, as torchrun's workers are: group signals do not reach it.
GRANDCHILD = "subprocess.Popen([sys.executable, '-c', HELPER], start_new_session=True)"
PATIENT = "import pathlib, time; pathlib.Path('helper').touch(); time.sleep(60)"
DEAF = "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path('helper').touch(); time.sleep(60)"


@dataclass(frozen=True)
class Room:
    """A folder in which a caller runs a tree; `mark` finds every process of it."""

    root: Path
    mark: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "TREE_TEST": self.mark}

    def child(self, body: str, helper: str = PATIENT) -> list[str]:
        """A command that does `body`; HELPER is the code of a grandchild."""
        head = f"import os, pathlib, signal, subprocess, sys, time\nHELPER = {helper!r}\n"
        (self.root / "child.py").write_text(head + textwrap.dedent(body))
        return [sys.executable, "child.py"]

    def caller(self, command: list[str], grace: float = 20.0) -> subprocess.Popen[str]:
        """Another process that runs `command` as a tree and prints what came of it."""
        code = (
            "import os\nfrom pipeline.launch.process import asked_to_stop, run_tree\n"
            f"print(run_tree({command!r}, env=os.environ, grace={grace}), asked_to_stop())\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def alive(self) -> list[int]:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def await_file(self, name: str) -> None:
        wait_for(lambda: (self.root / name).exists(), name)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        time.sleep(0.02)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.chdir(tmp_path)
    made = Room(tmp_path, f"tree-{uuid.uuid4().hex}")
    yield made
    for pid in made.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("body", "status"), [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)])
def test_status_is_the_child_s(body: str, status: int, room: Room) -> None:
    assert run_tree(room.child(body), env=room.environment, output=room.root / "log") == status
    assert not asked_to_stop()


def test_output_goes_to_a_file(room: Room) -> None:
    run_tree(
        room.child("print('out', flush=True); print('err', file=sys.stderr)"), env=room.environment, output=room.root / "log"
    )
    assert (room.root / "log").read_text() == "out\nerr\n"


def test_environment_is_what_is_given_and_the_mark(room: Room) -> None:
    command = room.child("import json; pathlib.Path('env').write_text(json.dumps(dict(os.environ)))")
    run_tree(command, env={"ONLY": "this", "TREE_TEST": room.mark})
    environment = json.loads((room.root / "env").read_text())
    assert set(environment) - {"LC_CTYPE"} == {"ONLY", "TREE_TEST", TOKEN}


def test_what_the_child_leaves_behind_is_ended(room: Room) -> None:
    body = f"{GRANDCHILD}\nwhile not os.path.exists('helper'): time.sleep(0.02)"
    assert run_tree(room.child(body), env=room.environment) == 0
    assert room.alive() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_to_the_caller_ends_the_tree(signum: signal.Signals, room: Room) -> None:
    caller = room.caller(room.child(f"{GRANDCHILD}\ntime.sleep(60)"))
    room.await_file("helper")
    caller.send_signal(signum)
    assert caller.communicate(timeout=PATIENCE)[0] == "-15 True\n"
    assert caller.returncode == 0
    assert room.alive() == []


def test_what_does_not_hear_term_is_killed_after_the_grace_time(room: Room) -> None:
    caller = room.caller(room.child(f"{GRANDCHILD}\ntime.sleep(60)", DEAF), grace=0.5)
    room.await_file("helper")
    caller.terminate()
    assert caller.communicate(timeout=PATIENCE)[0] == "-15 True\n"
    assert room.alive() == []


def test_a_child_that_saves_is_waited_for(room: Room) -> None:
    """TERM twice, as an impatient user sends it: the save goes on, and its status is returned."""
    body = """
        def save(*_):
            with open('asked', 'a') as file:
                file.write('x')
            pathlib.Path('saving').touch()
            time.sleep(1)
            pathlib.Path('saved').touch()
            sys.exit(5)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path('helper').touch()
        time.sleep(60)
    """
    caller = room.caller(room.child(body))
    room.await_file("helper")
    caller.terminate()
    room.await_file("saving")
    caller.terminate()
    assert caller.communicate(timeout=PATIENCE)[0] == "5 True\n"
    assert (room.root / "saved").exists()
    assert (room.root / "asked").read_text() == "x"
    assert room.alive() == []


def test_a_killed_caller_leaves_nothing(room: Room) -> None:
    """The child is told by the kernel and ends its workers, as torchrun does."""
    body = f"""
        worker = {GRANDCHILD}
        signal.signal(signal.SIGTERM, lambda *_: (worker.terminate(), worker.wait(), sys.exit(1)))
        time.sleep(60)
    """
    caller = room.caller(room.child(body))
    room.await_file("helper")
    assert len(room.alive()) == 3
    caller.kill()
    caller.communicate(timeout=PATIENCE)
    wait_for(lambda: not room.alive(), "the tree's end")


def test_time_limit(room: Room) -> None:
    with pytest.raises(TimeoutError, match=r"child\.py.* ran longer than 1 s"):
        run_tree(room.child(f"{GRANDCHILD}\ntime.sleep(60)", DEAF), env=room.environment, timeout=1.0, grace=0.5)
    assert room.alive() == []
    assert not asked_to_stop()


def test_a_tree_within_a_tree_ends_with_the_outer_one(room: Room) -> None:
    """A stage of the flow runs DVC, which runs a stage, which runs ranks."""
    inner = room.child(f"{GRANDCHILD}\ntime.sleep(60)")
    code = f"import os\nfrom pipeline.launch.process import run_tree\nrun_tree({inner!r}, env=os.environ)"
    caller = room.caller([sys.executable, "-c", code])
    room.await_file("helper")
    caller.terminate()
    caller.communicate(timeout=PATIENCE)
    assert room.alive() == []


def test_one_tree_leaves_another_alone(room: Room) -> None:
    other = subprocess.Popen(room.child("pathlib.Path('helper').touch(); time.sleep(60)"), env=room.environment)
    room.await_file("helper")
    assert run_tree([sys.executable, "-c", ""], env=room.environment) == 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_handlers_are_put_back(room: Room) -> None:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(s) for s in signals]
    run_tree(room.child(""), env=room.environment)
    assert [signal.getsignal(s) for s in signals] == before


def test_from_a_thread(room: Room) -> None:
    """Prefect runs tasks in threads, where no signal handler can be set."""
    found: list[int] = []
    command = room.child(f"{GRANDCHILD}\nwhile not os.path.exists('helper'): time.sleep(0.02)\nsys.exit(4)")
    thread = threading.Thread(target=lambda: found.append(run_tree(command, env=room.environment)))
    thread.start()
    thread.join(PATIENCE)
    assert found == [4]
    assert room.alive() == []


def test_a_command_that_is_not_there(room: Room) -> None:
    with pytest.raises(FileNotFoundError):
        run_tree(["./nowhere"], env=room.environment)
