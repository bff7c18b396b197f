"""Checkpoints of a run folder: which are complete, which is newest, which may go.

Contract: `RUN/checkpoint-STEP` is complete when its marker, written last, lists every file with its size and all are
there. An incomplete one is named and left alone. Order is by step number, whatever the file times say. Paths are
relative, so a folder may be moved.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import digest_file, read_json, write_json
from pipeline.config.errors import LadderError

MARKER = "complete.json"
KEPT = 2
"""Complete checkpoints kept: the newest, and one earlier in case the newest turns out damaged."""

_NAME = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    facts: dict[str, Any]
    """What the marker says: step, ranks, zero, global_batch, files {relative path: bytes}."""


@dataclass(frozen=True)
class Found:
    """newest: the newest complete checkpoint, if any. incomplete: names of folders that are not."""

    newest: Checkpoint | None
    incomplete: tuple[str, ...]


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def mark_complete(folder: Path, step: int, *, ranks: int, zero: int, global_batch: int) -> None:
    """Write the marker; call on rank 0 after all ranks have written, and after nothing else."""
    files = {
        p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MARKER
    }
    write_json(folder / MARKER, {"step": step, "ranks": ranks, "zero": zero, "global_batch": global_batch, "files": files})


def find(run: Path) -> Found:
    """Look at a run folder; a missing one holds no checkpoint."""
    folders = _in_order(run)
    checkpoints = {folder: _complete(folder, step) for step, folder in folders}
    complete = [c for c in checkpoints.values() if c is not None]
    return Found(complete[-1] if complete else None, tuple(f.name for f, c in checkpoints.items() if c is None))


def rotate(run: Path) -> None:
    """Delete complete checkpoints but the newest KEPT, marker first, so that half a deletion is no checkpoint."""
    complete = [folder for step, folder in _in_order(run) if _complete(folder, step)]
    for folder in complete[:-KEPT]:
        (folder / MARKER).unlink()
        shutil.rmtree(folder)


def describe(checkpoint: Checkpoint, root: Path) -> dict[str, Any]:
    """The content of `checkpoint.json`: what the checkpoint is made of, with hashes, relative to `root`."""
    files = {
        name: {"bytes": size, "sha256": digest_file(checkpoint.folder / name)}
        for name, size in sorted(checkpoint.facts["files"].items())
    }
    facts = {key: value for key, value in checkpoint.facts.items() if key != "files"}
    return {"folder": checkpoint.folder.relative_to(root).as_posix(), **facts, "files": files}


def _in_order(run: Path) -> list[tuple[int, Path]]:
    matches = [(_NAME.match(p.name), p) for p in run.glob("checkpoint-*") if p.is_dir()]
    return sorted((int(m.group(1)), p) for m, p in matches if m)


def _complete(folder: Path, step: int) -> Checkpoint | None:
    if not (folder / MARKER).is_file():
        return None
    try:
        facts = read_json(folder / MARKER, "the checkpoint's marker")
    except LadderError:
        return None
    whole = all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in facts["files"].items())
    return Checkpoint(folder, step, facts) if whole else None
