"""Rows on their way to the formatted set, without the command around the stage.

Would catch: a result that depends on how many rows are held or written at once, a batch of copies that grows with the weight, a
digest that two different sets share or that one set changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest

from pipeline.artifact import read_manifest
from pipeline.config.params import FormatParams
from pipeline.config.schema import load_params
from pipeline.dataset import rows as rooms
from pipeline.dataset.batches import PartsDigest, read_batches, row_bytes
from pipeline.dataset.reading import record
from stages.format import format
from tests.workspace import ROOT, rows, write_rows

pytestmark = pytest.mark.unit

pa: Any = pyarrow


def _formatted(folder: Path, model: Path, weight: float) -> list[list[Any]]:
    """The batches of the training split."""
    shipped = load_params(ROOT / "params.yaml").format.model_dump()
    source = {"files": ["rows.jsonl"], "record": "auto", "columns": {}, "weight": weight, "limit": None}
    params = FormatParams.model_validate(shipped | {"sources": [source]})
    format(params, raw=folder, model=model, formatted=folder / "formatted")
    return [
        [batch.to_pylist(), row_bytes(batch.column("parts")).tolist()] for batch in read_batches(folder / "formatted/train.arrow")
    ]


@pytest.mark.parametrize("weight", [1.0, 0.5, 7.0])
def test_sizes_of_batches_change_no_row(weight: float, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", rows(80))
    due = _formatted(tmp_path, base_model, weight)
    assert len(due) == 1
    monkeypatch.setattr(record, "HELD_CHARACTERS", 600)
    monkeypatch.setattr(rooms, "COPIED_BYTES", 500)
    found = _formatted(tmp_path, base_model, weight)
    assert len(found) > 10
    assert [row for rows_, _ in found for row in rows_] == due[0][0]
    if weight > 1:
        assert all(sum(sizes) - sizes[-1] <= 500 for _, sizes in found)


def test_the_digest_is_of_what_rows_say(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither batches nor the names of raw files nor rejected rows make another set; a letter does."""

    def digest() -> str:
        _formatted(tmp_path, base_model, 2.0)
        return read_manifest(tmp_path / "formatted", "it")["parts_digest"]

    values: list[Any] = list(rows(80))
    write_rows(tmp_path / "rows.jsonl", values)
    due = digest()
    write_rows(tmp_path / "rows.jsonl", [{"instruction": "no answer"}, *values])
    monkeypatch.setattr(record, "HELD_CHARACTERS", 600)
    monkeypatch.setattr(rooms, "COPIED_BYTES", 500)
    assert digest() == due
    assert (tmp_path / "formatted/rejects.jsonl").read_text()
    write_rows(tmp_path / "rows.jsonl", [*values[:-1], {**values[-1], "output": values[-1]["output"] + "!"}])
    assert digest() != due


def test_a_digest_tells_where_texts_and_rows_end() -> None:
    sets: list[list[list[str]]] = [
        [["ab", "c"], ["d", ""]],
        [["a", "bc"], ["d", ""]],
        [["ab", "c", "d", ""]],
        [["ab", "c"], ["d"]],
        [["ab", "c"]],
        [[], ["ab", "c"]],
        [["", ""]],
        [["é", "字😀"]],
    ]
    found: set[str] = set()
    for values in sets:
        array = pa.array(values, pa.list_(pa.string()))
        whole, pieces = PartsDigest(), PartsDigest()
        whole.add(array)
        for index in range(len(values)):
            pieces.add(array.slice(index, 1))
        pieces.add(array.slice(0, 0))
        assert whole.digest() == pieces.digest()
        found.add(whole.digest())
    assert len(found) == len(sets)
