"""Documents to sequences.

Would catch: a document lost, doubled or split; a sequence over its capacity; a plan that depends on anything but the
lengths; a packing worse than the simplest one; a file whose boundaries do not survive, or which `datasets` cannot map.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest

from pipeline.dataset.manifest import packed_files
from pipeline.dataset.masking import IGNORED
from pipeline.dataset.packing import SCHEMA, Plan, best_fit_decreasing, write_packed
from pipeline.dataset.spool import Spool

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


def _one_by_one(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing document by document, open sequences of equal room last in, first out."""
    sequences: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = next((room for room in range(lengths[index], capacity + 1) if by_room[room]), None)
        if room is None:
            room, sequence = capacity, len(sequences)
            sequences.append([])
        else:
            sequence = by_room[room].pop()
        sequences[sequence].append(index)
        by_room[room - lengths[index]].append(sequence)
    return sorted(sorted(s) for s in sequences)


def _packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    plan = best_fit_decreasing(lengths, capacity)
    borders = plan.offsets.tolist()
    assert plan.sequences == len(borders) - 1
    assert (borders[0], borders[-1]) == (0, len(lengths)) == (0, len(plan.documents))
    return [plan.documents[a:b].tolist() for a, b in pairwise(borders)]


def test_every_document_once_within_capacity() -> None:
    assert sum(len(lengths) for lengths, _ in MIXES) > 5000
    for lengths, capacity in MIXES:
        packs = _packs(lengths, capacity)
        assert sorted(d for pack in packs for d in pack) == list(range(len(lengths)))
        assert all(sum(lengths[d] for d in pack) <= capacity for pack in packs)
        assert all(packs)


def test_placing_equal_lengths_together_is_placing_one_by_one() -> None:
    for lengths, capacity in MIXES:
        assert _packs(lengths, capacity) == _one_by_one(lengths, capacity)


def test_as_good_as_the_textbook_and_no_worse_than_first_fit() -> None:
    for lengths, capacity in MIXES:
        packs = _packs(lengths, capacity)
        assert len(packs) == _best_fit(lengths, capacity)
        assert len(packs) <= _first_fit(lengths, capacity)


def test_first_fit_is_beaten_somewhere() -> None:
    """Else the comparison would be empty."""
    assert any(best_fit_decreasing(m, c).sequences < _first_fit(m, c) for m, c in MIXES)


@pytest.mark.parametrize("median", [90, 350])
def test_short_documents_fill_sequences(median: int) -> None:
    """The mixes of instruction data: many short, few long; B6 asks for 99.5 %."""
    chance = random.Random(1)
    drawn = (max(5, int(median * chance.lognormvariate(0, 0.9))) for _ in range(20_000))
    lengths = [length for length in drawn if length <= 2048]
    assert len(lengths) > 19_000
    assert sum(lengths) / (best_fit_decreasing(lengths, 2048).sequences * 2048) >= 0.995


def test_the_plan_is_the_same_every_time_and_ordered() -> None:
    for lengths, capacity in MIXES:
        packs = _packs(lengths, capacity)
        assert packs == _packs(tuple(lengths), capacity)
        assert packs == sorted(packs)
        assert all(pack == sorted(pack) for pack in packs)


def test_worked_example() -> None:
    """6 and 4 fill a sequence, 5 and 3 leave room for the 2: three would be first fit's number."""
    assert _packs([2, 3, 4, 5, 6], 10) == [[0, 1, 3], [2, 4]]


def test_nothing_to_pack() -> None:
    assert _packs([], 8) == []


@pytest.mark.parametrize(("length", "per_pack"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_equal_lengths(length: int, per_pack: int) -> None:
    packs = _packs([length] * 17, 8)
    assert len(packs) == -(-17 // per_pack)
    assert sum(len(p) for p in packs) == 17


@pytest.mark.parametrize("lengths", [[0, 1], [9], [3, 9, 1], [-1]])
def test_a_length_that_does_not_fit_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not within 1\.\.8"):
        best_fit_decreasing(lengths, 8)


def _spool(folder: Path, lengths: Sequence[int]) -> Spool:
    """Ids that tell document and position apart, every second one supervised."""
    ids = np.concatenate([[], *(1000 * d + np.arange(n) for d, n in enumerate(lengths))]).astype(np.int32)
    numbers = np.arange(len(lengths), dtype=np.int32)
    stored = np.where(np.arange(len(ids)) % 2, ~ids, ids)
    (folder / "ids").write_bytes(stored.tobytes())
    return Spool(FileIO(folder / "ids"), np.array(lengths, np.int32), 3 * numbers + 1, numbers % 2 * 2)


def _write(folder: Path, lengths: Sequence[int], capacity: int, **options: Any) -> Spool:
    folder.mkdir(exist_ok=True)
    spool = _spool(folder, lengths)
    write_packed(folder, "train", spool, best_fit_decreasing(lengths, capacity), capacity, **options)
    return spool


@pytest.mark.parametrize(("count", "shard_bytes"), [(1, 1 << 30), (5, 1 << 30), (700, 1 << 30), (7000, 1 << 18)])
def test_file_round_trip(count: int, shard_bytes: int, tmp_path: Path) -> None:
    chance = random.Random(count)
    lengths = [chance.randint(1, 40) for _ in range(count)]
    spool = _write(tmp_path, lengths, 50, shard_bytes=shard_bytes)
    starts = np.cumsum([0, *lengths])
    files = packed_files(tmp_path, "train")
    assert (len(files) > 2) == (count == 7000)
    data = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files])
    packs = _packs(lengths, 50)
    assert data.num_rows == len(packs)
    assert data.column_names == ["input_ids", "labels", "seq_lengths", "documents", "first_parts"]
    seen: list[int] = []
    for row, pack in zip(data, packs, strict=True):
        assert isinstance(row, dict)
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 50
        assert row["documents"] == spool.rows[pack].tolist()
        assert row["first_parts"] == spool.first_parts[pack].tolist()
        start = 0
        for document, length in zip(pack, row["seq_lengths"], strict=True):
            ids = [1000 * document + i for i in range(lengths[document])]
            supervised = (starts[document] + np.arange(length)) % 2
            assert row["input_ids"][start : start + length] == ids
            assert row["labels"][start : start + length] == np.where(supervised, ids, IGNORED).tolist()
            start += length
        seen += row["documents"]
    assert sorted(seen) == spool.rows.tolist()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_same_input_same_bytes(workers: int, tmp_path: Path) -> None:
    lengths = [5, 3, 8, 1] * 1000
    for name, used in (("a", 1), ("b", workers)):
        _write(tmp_path / name, lengths, 16, workers=used, shard_bytes=1 << 16)
    files = [sorted((tmp_path / name).glob("train-*")) for name in ("a", "b")]
    assert len(files[0]) > 1
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


def test_a_file_without_sequences_can_be_read(tmp_path: Path) -> None:
    _write(tmp_path, [], 8)
    data = datasets.Dataset.from_file(str(tmp_path / "train-00000.arrow"))
    assert data.num_rows == 0
    assert data.column_names == SCHEMA.names


@pytest.mark.parametrize(("capacity", "most"), [(4, 256), (1 << 14, 64), (1 << 21, 1)])
def test_batches_are_bounded(capacity: int, most: int, tmp_path: Path) -> None:
    """A reader maps one batch at a time: 256 sequences, or a million tokens where they are long."""
    spool = _spool(tmp_path, [4] * 1000)
    one_each = Plan(np.arange(1000), np.arange(1001))
    write_packed(tmp_path, "train", spool, one_each, capacity)
    with pa.memory_map(str(tmp_path / "train-00000.arrow")) as file:
        sizes = [batch.num_rows for batch in pa.ipc.open_stream(file)]
    assert sum(sizes) == 1000
    assert max(sizes) == most
