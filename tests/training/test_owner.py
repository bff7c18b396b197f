"""Who works in a run folder.

Would catch: two trainers in one run folder, a folder locked for good by a trainer that died, a stranger taken for the
owner because it got the owner's process id.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.config.errors import LaunchError
from pipeline.training.owner import RECORD, alive_owner, owned
from tests.workspace import ROOT

pytestmark = [pytest.mark.unit, pytest.mark.skipif(sys.platform != "linux", reason="start times are read from /proc")]

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom pipeline.training.owner import owned\n"
    "with owned(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


@contextmanager
def _holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a run folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _take(run: Path) -> bool:
    with owned(run):
        return json.loads((run / RECORD).read_text())["pid"] == os.getpid()


def test_a_second_owner_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _holder(run) as holder:
        with pytest.raises(LaunchError, match=rf"process {holder.pid} on {socket.gethostname()} trains here; wait"):
            _take(run)
        owner = alive_owner(run)
        assert owner is not None
        assert owner["pid"] == holder.pid
        holder.communicate("", timeout=30)
        assert not (run / RECORD).exists()
    assert _take(run)


def test_a_dead_owner_is_none(tmp_path: Path) -> None:
    with _holder(tmp_path) as holder:
        holder.kill()
        holder.wait()
        assert json.loads((tmp_path / RECORD).read_text())["pid"] == holder.pid
        assert alive_owner(tmp_path) is None
        assert _take(tmp_path)


def test_a_process_id_used_again_is_no_owner(tmp_path: Path) -> None:
    """Our own id with another start time: the process that wrote the record is gone."""
    with owned(tmp_path):
        record = json.loads((tmp_path / RECORD).read_text())
        assert alive_owner(tmp_path) == record
        (tmp_path / RECORD).write_text(json.dumps({**record, "start": record["start"] - 1}))
        assert alive_owner(tmp_path) is None


def test_a_record_of_another_host_counts_as_alive(tmp_path: Path) -> None:
    """Nothing can be looked up there; the error says what to delete if that host is gone."""
    record = {"host": "elsewhere", "pid": 1, "start": 1}
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(LaunchError, match=r"process 1 on elsewhere .* delete .*owner\.json"):
        _take(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text()) == record


@pytest.mark.parametrize("content", ["", "{", "\x00"])
def test_a_broken_record_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(content)
    assert alive_owner(tmp_path) is None
    assert _take(tmp_path)


def test_an_error_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), owned(tmp_path):
        raise ZeroDivisionError
    assert not (tmp_path / RECORD).exists()
