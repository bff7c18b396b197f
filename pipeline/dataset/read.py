"""Raw files to records, one by one, each with the place it came from.

Contract: a record is the parsed JSON object, byte-equal text in it; what is no record is a Reject with file, line and
reason, never an exception. Lines end at LF only (a U+2028 inside a text is text); a byte-order mark and CR before LF
are accepted; blank lines are no rows. A file that begins with `[` is one JSON array, whose rows are numbered from 1 as
lines are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from pipeline.config.errors import DataError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One raw row: `place` is `FILE:LINE`."""

    place: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Reject:
    """One raw row that cannot be used, and why: `reason` is a word to count by, `detail` the sentence."""

    place: str
    reason: str
    detail: str


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files the patterns name below `folder`, in the order stated, each once; DataError for a pattern that names none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        parts = Path(pattern).parts
        if not parts or Path(pattern).is_absolute() or ".." in parts:  # what lies elsewhere is no dep of the stage
            raise DataError(f"'{pattern}': not a path below {folder}; put the file there and name it relative to that folder")
        matches = sorted(p for p in folder.glob(pattern) if p.is_file())
        if not matches:
            there = ", ".join(sorted(p.name for p in folder.glob("*"))) if folder.is_dir() else "no such folder"
            raise DataError(f"{folder / pattern}: no such file; {folder} holds: {there or 'nothing'}")
        found.update(dict.fromkeys(matches))
    empty = [p for p in found if p.stat().st_size == 0]
    if empty:
        raise DataError(f"{empty[0]}: 0 bytes; a raw file holds at least one row, so remove it from the list or fill it")
    return list(found)


def read_rows(path: Path) -> Iterator[Record | Reject]:
    """Each row of one JSONL or JSON-array file."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM).lstrip()
    yield from _array_rows(path) if head.startswith(b"[") else _line_rows(path)


def _line_rows(path: Path) -> Iterator[Record | Reject]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            content = content.strip(b" \t\r\n")
            if content:
                yield _parsed(f"{path.name}:{number}", content)


def _array_rows(path: Path) -> Iterator[Record | Reject]:
    try:
        rows: list[Any] = json.loads(path.read_bytes().removeprefix(_BOM), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: begins as a JSON array and is none ({error}); repair it, or write one object per line"
        ) from error
    for number, value in enumerate(rows, start=1):
        yield _checked(f"{path.name}:{number}", value)


def _parsed(place: str, content: bytes) -> Record | Reject:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return Reject(place, "invalid_utf8", f"byte {error.start} of the line is not UTF-8")
    try:
        value: Any = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return Reject(place, "broken_json", "nested too deeply")
    except ValueError as error:
        return Reject(place, "broken_json", str(error))
    return _checked(place, value)


def _checked(place: str, value: object) -> Record | Reject:
    if not isinstance(value, dict):
        return Reject(place, "not_an_object", f"holds {type(value).__name__}")
    return Record(place, cast("dict[str, Any]", value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
