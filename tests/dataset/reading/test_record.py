"""How many rows are held at once.

Would catch: rows of many megabytes held by the thousand, a row lost or doubled at a border, a limit that long keys or lists of
small values pass by.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.dataset.reading import record
from pipeline.dataset.reading.record import Record, Reject, next_rows

pytestmark = pytest.mark.unit


def _rows(*values: dict[str, Any]) -> list[Record | Reject]:
    return [Record(f"f:{number}", value) for number, value in enumerate(values, start=1)]


def test_ordinary_rows_are_counted_and_long_ones_weighed() -> None:
    small, large = {"a": "x" * 700}, {"a": "x" * (5 << 20)}
    waiting = iter(_rows(*[small] * 2500, large, large, small))
    taken: list[int] = []
    while rows := next_rows(waiting, 1024):
        taken.append(len(rows))
    assert taken == [1024, 1024, 453, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x" * 1000},
        {"k" * 1000: 1},
        {"a": [{"b": "x"}] * 40},
        {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y" * 500}]},
        {"a": [1.5] * 40},
    ],
)
def test_whatever_is_large_counts(value: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "HELD_CHARACTERS", 1000)
    assert len(next_rows(iter(_rows(*[value] * 3)), 1024)) == 1
    assert len(next_rows(iter([Reject("f:1", "broken_json", "d" * 1000)] * 3), 1024)) == 1


def test_every_row_comes_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "HELD_CHARACTERS", 300)
    rows = _rows(*({"a": "x" * (number * 37 % 400)} for number in range(200)))
    waiting = iter(rows)
    found: list[Record | Reject] = []
    while held := next_rows(waiting, 5):
        assert len(held) <= 5
        found += held
    assert found == rows
