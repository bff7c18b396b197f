"""Checkpoints of a run folder.

Would catch: half a checkpoint taken for a whole one, step 9 taken for later than 10, file times that decide, a rotation
that deletes the newest or an incomplete one, a folder that cannot be moved.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.artifact import digest_file
from pipeline.training.checkpoint import MARKER, describe, find, folder_name, mark_complete, rotate

pytestmark = pytest.mark.unit


def _write(run: Path, step: int, *, complete: bool = True) -> Path:
    folder = run / folder_name(step)
    (folder / "shards").mkdir(parents=True)
    (folder / "shards/rank0.pt").write_text(f"weights of step {step}")
    (folder / "state.json").write_text(str(step))
    if complete:
        mark_complete(folder, step, ranks=2, zero=2, global_batch=4)
    return folder


def _names(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def test_marker_lists_every_file_and_what_the_run_was(tmp_path: Path) -> None:
    folder = _write(tmp_path, 3)
    assert json.loads((folder / MARKER).read_text()) == {
        "step": 3,
        "ranks": 2,
        "zero": 2,
        "global_batch": 4,
        "files": {"shards/rank0.pt": 17, "state.json": 1},
    }


def test_newest_by_number_whatever_the_file_times(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        _write(tmp_path, step)
    for number, step in enumerate((100, 11, 10, 9)):
        os.utime(tmp_path / folder_name(step), (number, number))
        os.utime(tmp_path / folder_name(step) / MARKER, (number, number))
    newest = find(tmp_path).newest
    assert newest is not None
    assert (newest.step, newest.folder) == (100, tmp_path / "checkpoint-100")
    shutil.rmtree(tmp_path / "checkpoint-100")
    shutil.rmtree(tmp_path / "checkpoint-11")
    newest = find(tmp_path).newest
    assert newest is not None
    assert newest.step == 10


def test_an_incomplete_one_is_named_and_passed_over(tmp_path: Path) -> None:
    _write(tmp_path, 2)
    _write(tmp_path, 9, complete=False)
    _write(tmp_path, 10, complete=False)
    found = find(tmp_path)
    assert found.newest is not None
    assert found.newest.step == 2
    assert found.incomplete == ("checkpoint-9", "checkpoint-10")
    assert (tmp_path / "checkpoint-10/state.json").exists()


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "marker cut off", "marker empty", "marker no object"])
def test_a_damaged_one_is_incomplete(damage: str, tmp_path: Path) -> None:
    _write(tmp_path, 1)
    folder = _write(tmp_path, 2)
    shard, marker = folder / "shards/rank0.pt", folder / MARKER
    match damage:
        case "missing":
            shard.unlink()
        case "shorter":
            shard.write_text("weights")
        case "longer":
            shard.write_text("weights of step 2 and more")
        case "marker cut off":
            marker.write_text(marker.read_text()[:40])
        case "marker empty":
            marker.write_text("")
        case _:
            marker.write_text("[]")
    found = find(tmp_path)
    assert found.newest is not None
    assert found.newest.step == 1
    assert found.incomplete == ("checkpoint-2",)


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-", "checkpoint-5.old", "checkpoint-best", "checkpoint--1", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    found = find(tmp_path)
    assert (found.newest, found.incomplete) == (None, ())


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    found = find(tmp_path / "none")
    assert (found.newest, found.incomplete) == (None, ())


def test_rotation_keeps_two_by_number(tmp_path: Path) -> None:
    for step in (9, 10, 8, 11):
        _write(tmp_path, step)
        os.utime(tmp_path / folder_name(step), (100 - step, 100 - step))
    (tmp_path / "curve.jsonl").touch()
    rotate(tmp_path)
    assert _names(tmp_path) == ["checkpoint-10", "checkpoint-11", "curve.jsonl"]
    rotate(tmp_path)
    assert _names(tmp_path) == ["checkpoint-10", "checkpoint-11", "curve.jsonl"]


def test_rotation_neither_counts_nor_deletes_incomplete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)
    for step in (4, 5):
        _write(tmp_path, step, complete=False)
    rotate(tmp_path)
    assert _names(tmp_path) == [f"checkpoint-{n}" for n in (2, 3, 4, 5)]


@pytest.mark.parametrize("steps", [(), (1,), (1, 2)])
def test_rotation_of_few(steps: tuple[int, ...], tmp_path: Path) -> None:
    for step in steps:
        _write(tmp_path, step)
    rotate(tmp_path)
    assert _names(tmp_path) == [folder_name(s) for s in steps]


def test_a_moved_run_is_as_good(tmp_path: Path) -> None:
    _write(tmp_path / "models/runs/abc", 4)
    shutil.move(tmp_path / "models", tmp_path / "elsewhere")
    newest = find(tmp_path / "elsewhere/runs/abc").newest
    assert newest is not None
    assert newest.step == 4
    assert str(tmp_path) not in (newest.folder / MARKER).read_text()


def test_description_has_hashes_and_relative_paths(tmp_path: Path) -> None:
    folder = _write(tmp_path / "models/runs/abc", 4)
    newest = find(tmp_path / "models/runs/abc").newest
    assert newest is not None
    assert describe(newest, tmp_path / "models") == {
        "folder": "runs/abc/checkpoint-4",
        "step": 4,
        "ranks": 2,
        "zero": 2,
        "global_batch": 4,
        "files": {
            "shards/rank0.pt": {"bytes": 17, "sha256": digest_file(folder / "shards/rank0.pt")},
            "state.json": {"bytes": 1, "sha256": digest_file(folder / "state.json")},
        },
    }
