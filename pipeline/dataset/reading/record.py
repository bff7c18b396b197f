"""What a reader hands on: a row, or why there is none.

Contract: every row of a raw file is one Record or one Reject, and `place` says where it lies. A reason of ENDS_FILE stands for
all that follows in its file, which nobody can count; so whoever adds up rows also names these files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

MAX_RECORD_BYTES = 64 << 20
"""Longest row that is read: 64 MiB, ten times the text that a context of a million tokens holds. Measured while one is parsed:
320 MiB if it is one text of four-byte characters, 690 MiB if it is a million small objects."""

HELD_CHARACTERS = 4 << 20
"""Text of the rows that are held at once. 1,024 ordinary rows have a million characters; of rows of 10 MB each one is held."""

_VALUE_CHARACTERS = 32
"""What a number, a list or an object counts as; so many bytes, at least, it takes."""

ENDS_FILE = frozenset(
    {
        "broken_array",  # after it, where a row begins is a guess
        "broken_csv",
        "broken_file",  # the decompressor gave up
        "broken_parquet",
        "cut_file",  # compressed data that stops too early
        "duplicate_column",
        "empty_file",
        "unsupported_file",
    }
)
"""Reasons after which nothing more comes from a file."""


@dataclass(frozen=True)
class Record:
    """One raw row: `place` is `FILE:NUMBER`, a line (JSONL, CSV) or a row (JSON array, Parquet), from 1."""

    place: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Reject:
    """One raw row that cannot be used, and why: `reason` is a word to count by, `detail` the sentence."""

    place: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Opaque:
    """The value of a Parquet column that JSON has no form for (bytes, times, decimals); it is not read."""

    type: str


Row = TypeVar("Row", bound=Record | Reject)


def next_rows(rows: Iterator[Row], most: int) -> list[Row]:
    """Up to `most` of the next rows, fewer once they hold HELD_CHARACTERS; none at the end."""
    found: list[Row] = []
    size = 0
    for row in itertools.islice(rows, most):
        found.append(row)
        size += _size(row.value) if isinstance(row, Record) else len(row.detail)
        if size >= HELD_CHARACTERS:
            break
    return found


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        inner = cast("dict[str, Any]", value)
        return _VALUE_CHARACTERS + sum(map(len, inner)) + sum(map(_size, inner.values()))
    return _VALUE_CHARACTERS + (sum(map(_size, cast("list[Any]", value))) if isinstance(value, list) else 0)


class FileBroken(Exception):
    """Inside the readers: the rest of the file is lost. `reason` is one of ENDS_FILE."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = printable(detail.strip().splitlines()[0])


def printable(text: str) -> str:
    """`text` with line ends, control characters and halves of surrogate pairs written as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def too_long(place: str, size: int) -> Reject:
    """A row that was streamed past without being held."""
    return Reject(place, "too_long", f"{size:,} bytes; the limit of a row is {MAX_RECORD_BYTES:,}")
