"""Documents to fixed-length sequences: best fit decreasing over the whole set.

Contract: `best_fit_decreasing` is deterministic, cuts no document and looks at lengths only. `write_packed` puts Arrow
stream files, `SPLIT-00000.arrow` and on: a row is a sequence of at most `capacity` tokens with the lengths, the row
numbers and the first parts of its documents, so that training can restart positions and keep documents apart, and gates
can tell which documents a step saw. Equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

from pipeline.dataset.manifest import shard_name
from pipeline.dataset.masking import ids_and_labels, offsets_of
from pipeline.dataset.spool import Spool, in_order
from pipeline.progress import progress

pa: Any = pyarrow

_INTS = pa.list_(pa.int32())
SCHEMA = pa.schema({"input_ids": _INTS, "labels": _INTS, "seq_lengths": _INTS, "documents": _INTS, "first_parts": _INTS})

ROWS_PER_BATCH = 256
TOKENS_PER_BATCH = 1 << 20
"""A reader maps one batch at a time, so a batch is small: 256 sequences, fewer where they are longer than 4,096 tokens."""
SHARD_BYTES = 2 << 30

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Which documents stand in which sequence.

    documents: (documents,) indices, sequence after sequence; offsets: (sequences + 1,), sequence i holds
    documents[offsets[i] : offsets[i + 1]]. Sequences are ordered by their first document, documents by index.
    """

    documents: Ints
    offsets: Ints

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1


def best_fit_decreasing(lengths: Sequence[int] | npt.NDArray[np.integer[Any]], capacity: int) -> Plan:
    """Place the longest document first, each where the least room stays free.

    All documents of one length are placed together. Sequences with room r take r // length of them, and those with the
    least room come first: after one document such a sequence has still the least room of all, so filling it to the end is
    what placing one by one would do. Hence whole arrays move from room to room, and a million documents take some ten
    thousand moves instead of a million. Open sequences of equal room are used last in, first out.
    ValueError for a length outside 1..capacity.
    """
    sizes = np.asarray(lengths, np.int64)
    if not len(sizes):
        return Plan(np.empty(0, np.int64), np.zeros(1, np.int64))
    if not (sizes.min() >= 1 and sizes.max() <= capacity):
        raise ValueError(f"document lengths {sizes.min()}..{sizes.max()} are not within 1..{capacity}")
    order = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(sizes), np.int64)
    open_by_room: list[list[Ints]] = [list[Ints]() for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where some sequence has room r
    opened = 0
    sorted_sizes = sizes[order]
    starts: list[int] = [0, *(np.flatnonzero(np.diff(sorted_sizes)) + 1).tolist()]
    for start, end in pairwise([*starts, len(sizes)]):
        length, waiting = int(sorted_sizes[start]), order[start:end]
        while len(waiting):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                taken = open_by_room[room].pop()[::-1]
                if not open_by_room[room]:
                    rooms ^= 1 << room
            else:
                room = capacity
                taken = np.arange(opened, opened - (-len(waiting) // (capacity // length)))
                opened += len(taken)
            each = room // length
            full, rest = divmod(len(waiting), each)
            if full >= len(taken):
                full, rest = len(taken), 0
            elif full + bool(rest) < len(taken):
                open_by_room[room].append(taken[full + bool(rest) :][::-1])
                rooms |= 1 << room
            placed = full * each + rest
            sequence_of[waiting[:placed]] = np.repeat(taken[: full + bool(rest)], each)[:placed]
            waiting = waiting[placed:]
            for moved, left in ((taken[:full], room - each * length), (taken[full : full + bool(rest)], room - rest * length)):
                if len(moved):
                    open_by_room[left].append(moved)
                    rooms |= 1 << left
    first = np.empty(opened, np.int64)
    first[sequence_of[::-1]] = np.arange(len(sizes))[::-1]  # of several values numpy keeps the last: the lowest index
    documents = np.argsort(first[sequence_of], kind="stable")
    counts = np.bincount(sequence_of, minlength=opened)[np.argsort(first)]
    return Plan(documents, offsets_of(counts))


def write_packed(
    folder: Path, split: str, spool: Spool, plan: Plan, capacity: int, *, workers: int = 1, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the sequences of a plan as Arrow streams of about `shard_bytes` each, the form that `datasets` maps into memory.

    A split without sequences is one file without rows.
    """
    offsets = offsets_of(spool.lengths)
    step = max(1, min(ROWS_PER_BATCH, TOKENS_PER_BATCH // capacity))
    starts = range(0, plan.sequences, step)
    shard = 0
    sink, writer = _open(folder / shard_name(split, shard))
    with progress(f"pack {split}: sequences written", plan.sequences) as advance:
        for batch in in_order(lambda start: _batch(spool, offsets, plan, start, start + step), starts, workers):
            if sink.tell() >= shard_bytes:
                _close(sink, writer)
                shard += 1
                sink, writer = _open(folder / shard_name(split, shard))
            writer.write_batch(batch)
            advance(batch.num_rows)
    _close(sink, writer)


def _open(path: Path) -> tuple[Any, Any]:
    sink = pa.OSFile(str(path), "wb")
    return sink, pa.ipc.new_stream(sink, SCHEMA)


def _close(sink: Any, writer: Any) -> None:
    writer.close()
    sink.close()


def _batch(spool: Spool, offsets: Ints, plan: Plan, start: int, end: int) -> Any:
    borders = plan.offsets[start : end + 1] - plan.offsets[start]
    documents = plan.documents[plan.offsets[start] :][: borders[-1]]
    lengths = spool.lengths[documents]
    ids, labels = ids_and_labels(spool.read(offsets[documents], lengths))
    token_borders = offsets_of(lengths)[borders]
    columns = [
        *((token_borders, values) for values in (ids, labels)),
        *((borders, values) for values in (lengths, spool.rows[documents], spool.first_parts[documents])),
    ]
    return pa.record_batch([pa.ListArray.from_arrays(_arrow(b.astype(np.int32)), _arrow(v)) for b, v in columns], schema=SCHEMA)


def _arrow(values: npt.NDArray[np.int32]) -> Any:
    """The values as they lie in memory; `pa.array` would import pandas, 0.3 s."""
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
