"""Chunks of rows prepared on several processes.

Would catch: an order or a content that depends on the number of workers, a chunk lost at the end, a process that is left behind.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import load_params
from pipeline.dataset import preparing
from pipeline.dataset.preparing import Chunk, Prepared, Preparer, prepared_chunks
from pipeline.dataset.reading.record import Record, Reject
from tests.workspace import ROOT, rows

pytestmark = pytest.mark.unit

CHUNK: list[Record | Reject] = [
    *(Record(f"f:{number}", value) for number, value in enumerate(rows(30), start=1)),
    Record("f:31", {"instruction": "q", "output": ""}),
    Reject("f:32", "broken_json", "x"),
    Record("f:33", {"instruction": "q", "instances": [{"output": "a"}, {"output": "b"}], "other": 1}),
]


def _facts(made: Prepared) -> list[Any]:
    signed = None if made.signatures is None else made.signatures.tolist()
    return [made.batch.to_pylist(), made.unit, made.keys, made.held_out, signed, made.rejects, made.expanded, made.ignored]


def test_the_same_with_any_number_of_workers(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "CHUNKS_ALONE", 1)
    shipped = load_params(ROOT / "params.yaml").format
    near = type(shipped).model_validate(shipped.model_dump() | {"near_duplicates": {"threshold": 0.8, "shingle": 5}})
    preparer = Preparer(near, base_model)
    chunks = [Chunk(0, "alpaca", CHUNK[number:]) for number in range(9)] + [Chunk(0, None, CHUNK)]
    found = {
        workers: [_facts(made) for made in prepared_chunks(preparer, near, base_model, chunks, workers)] for workers in (1, 2, 3)
    }
    assert found[1] == found[2] == found[3]
    assert len(found[1]) == len(chunks)
    batch, unit, keys, _, signed, rejects, expanded, ignored = found[1][0]
    assert len(batch) == len(unit) == len(keys) == len(signed) == 32
    assert [reject.reason for _, reject in rejects] == ["empty_answer", "broken_json"]
    assert (expanded, ignored) == (1, {"other": 1})
    assert {reject.reason for _, reject in found[1][-1][5]} == {"unknown_form", "broken_json"}
    assert multiprocessing.active_children() == []
    assert list(prepared_chunks(preparer, near, base_model, [], 2)) == []


def test_leaving_early_leaves_no_process(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "CHUNKS_ALONE", 0)
    shipped = load_params(ROOT / "params.yaml").format
    running = prepared_chunks(Preparer(shipped, base_model), shipped, base_model, [Chunk(0, "alpaca", CHUNK)] * 20, 2)
    next(running)
    assert multiprocessing.active_children()
    assert isinstance(running, Generator)
    running.close()
    assert multiprocessing.active_children() == []
