"""Documents to fixed-length sequences: best fit decreasing over the whole set.

Contract: `best_fit_decreasing` is deterministic, splits no document and looks at lengths only. `write_packed` puts one
Arrow stream file per split: a row is a sequence of at most `capacity` tokens with the lengths and the row numbers of
its documents, so that training can restart positions and keep documents apart, and gates can tell which documents a
step saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

pa: Any = pyarrow

_INTS = pa.list_(pa.int32())
SCHEMA = pa.schema({"input_ids": _INTS, "labels": _INTS, "seq_lengths": _INTS, "documents": _INTS})

_ROWS_PER_BATCH = 256


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of documents for each sequence; the longest is placed first, where the least room stays free.

    Open sequences are kept by free room in a table, and the set of rooms in use as the bits of one integer, so the best
    fit is the lowest bit not below the length. Sequences are ordered by their first document, documents by index.
    ValueError for a length outside 1..capacity.
    """
    if lengths and not (min(lengths) >= 1 and max(lengths) <= capacity):
        raise ValueError(f"document lengths {min(lengths)}..{max(lengths)} are not within 1..{capacity}")
    sequences: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(index)
        left = room - length
        if not by_room[left]:
            rooms |= 1 << left
        by_room[left].append(sequence)
    return sorted(sorted(s) for s in sequences)


def write_packed(
    path: Path, tokens: np.ndarray, labels: np.ndarray, offsets: np.ndarray, rows: Sequence[int], packs: Sequence[Sequence[int]]
) -> None:
    """Write sequences as an Arrow stream, the form that `datasets` maps into memory.

    tokens, labels: (total,) int32 over all documents; offsets: (documents + 1,) int64, document i lies at
    offsets[i]:offsets[i+1]; rows: (documents,) row number of each document in the formatted set.
    """
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for start in range(0, len(packs), _ROWS_PER_BATCH):
            batch = packs[start : start + _ROWS_PER_BATCH]
            spans = [[(int(offsets[d]), int(offsets[d + 1])) for d in pack] for pack in batch]
            columns = [
                [np.concatenate([tokens[a:b] for a, b in pack]) for pack in spans],
                [np.concatenate([labels[a:b] for a, b in pack]) for pack in spans],
                [[b - a for a, b in pack] for pack in spans],
                [[rows[d] for d in pack] for pack in batch],
            ]
            writer.write_batch(pa.record_batch([pa.array(c, type=_INTS) for c in columns], schema=SCHEMA))
