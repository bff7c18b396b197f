"""Documents to sequences.

Would catch: a document lost, doubled or split; a sequence over its capacity; a plan that depends on anything but the
lengths; a packing worse than the simplest one; a file whose boundaries do not survive, or which `datasets` cannot map.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest

from pipeline.dataset.packing import SCHEMA, best_fit_decreasing, write_packed

pytestmark = pytest.mark.unit

pa: Any = pyarrow


def _length_mixes() -> Iterator[tuple[list[int], int]]:
    for seed in range(150):
        chance = random.Random(seed)
        capacity = chance.choice([1, 2, 7, 64, 128, 1000, 4096])
        shape = chance.choice(["even", "short", "long", "two", "full"])
        draw = {
            "even": lambda r, c: r.randint(1, c),
            "short": lambda r, c: max(1, min(c, int(r.expovariate(8 / c)))),
            "long": lambda r, c: r.randint(max(1, c // 2), c),
            "two": lambda r, c: r.choice([max(1, c // 3), max(1, c // 2 + 1)]),
            "full": lambda r, c: c,
        }[shape]
        yield [draw(chance, capacity) for _ in range(chance.choice([0, 1, 2, 10, 300]))], capacity


MIXES = list(_length_mixes())


def _first_fit(lengths: Sequence[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        for i, room in enumerate(rooms):
            if length <= room:
                rooms[i] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


def _best_fit(lengths: Sequence[int], capacity: int) -> int:
    """The textbook form of best fit decreasing: look at every open sequence."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


def test_every_document_once_within_capacity() -> None:
    assert sum(len(lengths) for lengths, _ in MIXES) > 5000
    for lengths, capacity in MIXES:
        packs = best_fit_decreasing(lengths, capacity)
        assert sorted(d for pack in packs for d in pack) == list(range(len(lengths)))
        assert all(sum(lengths[d] for d in pack) <= capacity for pack in packs)
        assert all(packs)


def test_as_good_as_the_textbook_and_no_worse_than_first_fit() -> None:
    for lengths, capacity in MIXES:
        packs = best_fit_decreasing(lengths, capacity)
        assert len(packs) == _best_fit(lengths, capacity)
        assert len(packs) <= _first_fit(lengths, capacity)


def test_first_fit_is_beaten_somewhere() -> None:
    """Else the comparison would be empty."""
    assert any(len(best_fit_decreasing(m, c)) < _first_fit(m, c) for m, c in MIXES)


def test_short_documents_fill_sequences() -> None:
    """The mix of instruction data: many short, few long; B6 asks for 99.5 %."""
    chance = random.Random(1)
    lengths = [max(5, min(2048, int(chance.lognormvariate(4.5, 0.9)))) for _ in range(20_000)]
    packs = best_fit_decreasing(lengths, 2048)
    assert sum(lengths) / (len(packs) * 2048) >= 0.995


def test_the_plan_is_the_same_every_time_and_ordered() -> None:
    for lengths, capacity in MIXES:
        packs = best_fit_decreasing(lengths, capacity)
        assert packs == best_fit_decreasing(tuple(lengths), capacity)
        assert packs == sorted(packs)
        assert all(pack == sorted(pack) for pack in packs)


def test_worked_example() -> None:
    """6 and 4 fill a sequence, 5 and 3 leave room for the 2: three would be first fit's number."""
    assert best_fit_decreasing([2, 3, 4, 5, 6], 10) == [[0, 1, 3], [2, 4]]


def test_nothing_to_pack() -> None:
    assert best_fit_decreasing([], 8) == []


@pytest.mark.parametrize(("length", "per_pack"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_equal_lengths(length: int, per_pack: int) -> None:
    packs = best_fit_decreasing([length] * 17, 8)
    assert len(packs) == -(-17 // per_pack)
    assert sum(len(p) for p in packs) == 17


@pytest.mark.parametrize("lengths", [[0, 1], [9], [3, 9, 1], [-1]])
def test_a_length_that_does_not_fit_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not within 1\.\.8"):
        best_fit_decreasing(lengths, 8)


def _documents(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids that tell document and position apart, labels on every second one, offsets."""
    tokens = np.concatenate([[], *(1000 * d + np.arange(n) for d, n in enumerate(lengths))]).astype(np.int32)
    labels = np.where(np.arange(len(tokens)) % 2, tokens, -100).astype(np.int32)
    return tokens, labels, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


@pytest.mark.parametrize("count", [1, 5, 700])
def test_file_round_trip(count: int, tmp_path: Path) -> None:
    chance = random.Random(count)
    lengths = [chance.randint(1, 40) for _ in range(count)]
    numbers = [3 * d + 1 for d in range(count)]
    tokens, labels, offsets = _documents(lengths)
    packs = best_fit_decreasing(lengths, 50)
    write_packed(tmp_path / "train.arrow", tokens, labels, offsets, numbers, packs)
    data = datasets.Dataset.from_file(str(tmp_path / "train.arrow"))
    assert data.num_rows == len(packs)
    assert data.column_names == ["input_ids", "labels", "seq_lengths", "documents"]
    seen: list[int] = []
    for row, pack in zip(data, packs, strict=True):
        assert isinstance(row, dict)
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 50
        assert row["documents"] == [numbers[d] for d in pack]
        start = 0
        for document, length in zip(pack, row["seq_lengths"], strict=True):
            span = slice(int(offsets[document]), int(offsets[document + 1]))
            assert row["input_ids"][start : start + length] == tokens[span].tolist()
            assert row["labels"][start : start + length] == labels[span].tolist()
            start += length
        seen += row["documents"]
    assert sorted(seen) == numbers


def test_same_input_same_bytes(tmp_path: Path) -> None:
    lengths = [5, 3, 8, 1] * 100
    for name in ("a", "b"):
        write_packed(tmp_path / name, *_documents(lengths), range(400), best_fit_decreasing(lengths, 16))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_without_sequences_can_be_read(tmp_path: Path) -> None:
    write_packed(tmp_path / "empty.arrow", *_documents([]), [], [])
    data = datasets.Dataset.from_file(str(tmp_path / "empty.arrow"))
    assert data.num_rows == 0
    assert data.column_names == SCHEMA.names


def test_batches_are_bounded(tmp_path: Path) -> None:
    """A reader maps one batch at a time."""
    write_packed(tmp_path / "many.arrow", *_documents([4] * 1000), range(1000), [[d] for d in range(1000)])
    with pa.memory_map(str(tmp_path / "many.arrow")) as file:
        sizes = [batch.num_rows for batch in pa.ipc.open_stream(file)]
    assert sum(sizes) == 1000
    assert max(sizes) <= 256
