"""Record batches of an Arrow stream file, one at a time, however large the file.

Contract: `read_batches` gives every batch in order. A batch is read from the disk as it is looked at and may be kept; what lies
behind is given back, so that resident memory does not grow with the file (it did: 5 GB mapped were 5 GB resident).
`PartsDigest` names what rows say, whatever the batches they come in.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

pa: Any = pyarrow

FORGET_BYTES = 64 << 20


def read_batches(path: Path) -> Iterator[Any]:
    """The batches of a stream file that holds at least its schema."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last batch that looks into it
    read = 0
    for batch in pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(pages))):
        yield batch
        read += batch.nbytes
        if read >= FORGET_BYTES:
            pages.madvise(mmap.MADV_DONTNEED)
            read = 0


class PartsDigest:
    """SHA-256 over the parts of rows: how many each has, their lengths, their text. A gigabyte takes about a second."""

    def __init__(self) -> None:
        self._hashes = tuple(hashlib.sha256() for _ in range(3))

    def add(self, parts: Any) -> None:
        """The next rows: a list array of texts."""
        if not len(parts):
            return
        borders = offsets_in(parts)
        texts = parts.values.slice(int(borders[0]), int(borders[-1] - borders[0]))
        ends = offsets_in(texts)
        content = texts.buffers()[2] if len(texts) else None
        counts, lengths, text = self._hashes
        counts.update(np.diff(borders).astype("<i4").tobytes())
        lengths.update(np.diff(ends).astype("<i4").tobytes())
        if content is not None:
            text.update(content[int(ends[0]) : int(ends[-1])])

    def digest(self) -> str:
        """64 hex digits."""
        return hashlib.sha256("".join(h.hexdigest() for h in self._hashes).encode()).hexdigest()


def row_bytes(parts: Any) -> npt.NDArray[np.int64]:
    """(rows,) bytes of text of each row."""
    texts = parts.values
    return np.diff(offsets_in(texts).astype(np.int64)[offsets_in(parts)])


def offsets_in(array: Any) -> npt.NDArray[np.int32]:
    """(n + 1,) offsets of a list or text array, read off its buffer: pyarrow's own conversion imports pandas, 0.3 s."""
    if not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
