"""Raw files to records, one by one, each with the place it came from.

Contract: a row is a Record, byte-equal text in it, or a Reject with file, line and reason; never an exception, unless the disk
fails (DataError). A file that gives no row at all is one Reject. Files are read as they come, in bounded memory: under 1 GiB for
any file, 100 MB for one of ordinary rows. JSONL, a JSON array, CSV, TSV and Parquet, each but the last also as gzip or zstd;
`source.py` says how a form is told, `json_rows.py`, `csv_rows.py` and `parquet_rows.py` what is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config.errors import DataError
from pipeline.dataset.reading.csv_rows import csv_rows
from pipeline.dataset.reading.hub import SCHEME, find_hub_files, hub_name
from pipeline.dataset.reading.json_rows import array_rows, line_rows
from pipeline.dataset.reading.parquet_rows import parquet_rows
from pipeline.dataset.reading.record import ENDS_FILE, FileBroken, Opaque, Record, Reject, printable
from pipeline.dataset.reading.source import open_blocks

__all__ = ["ENDS_FILE", "Opaque", "Record", "Reject", "file_name", "find_files", "read_rows"]


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files the patterns name, in the order stated, each once; DataError for a pattern that names none.

    A pattern is a path or a glob below `folder`, or `hub://OWNER/NAME@COMMIT/PATTERN`.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(find_hub_files(pattern) if pattern.startswith(SCHEME) else _below(folder, pattern)))
    empty = [p for p in found if p.stat().st_size == 0]
    if empty:
        raise DataError(f"{empty[0]}: 0 bytes; a raw file holds at least one row, so remove it from the list or fill it")
    return list(found)


def file_name(path: Path, folder: Path) -> str:
    """What a place calls a file: its path below `folder`, or its `hub://` name; printable whatever the disk holds."""
    below = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else hub_name(path) or path.name
    return printable(below)


def read_rows(path: Path, folder: Path | None = None, skipped: Counter[str] | None = None) -> Iterator[Record | Reject]:
    """Each row of one file. Places name it by its path below `folder`; `skipped` counts what is no row: blank lines."""
    name = file_name(path, path.parent if folder is None else folder)
    number_of_rows = 0
    try:
        for row in _rows(name, path, Counter() if skipped is None else skipped):
            number_of_rows += 1
            yield row
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; the file cannot be read") from error
    if not number_of_rows:
        yield Reject(f"{name}:1", "empty_file", "the file holds no row")


def _below(folder: Path, pattern: str) -> list[Path]:
    parts = Path(pattern).parts
    if not parts or Path(pattern).is_absolute() or ".." in parts:  # what lies elsewhere is no dep of the stage
        raise DataError(f"'{pattern}': not a path below {folder}; put the file there and name it relative to that folder")
    if (folder / pattern).is_file():  # also one whose name holds `[` or `*`
        return [folder / pattern]
    matches = sorted(p for p in folder.glob(pattern) if p.is_file())
    if not matches:
        there = ", ".join(sorted(p.name for p in folder.glob("*"))) if folder.is_dir() else "no such folder"
        raise DataError(f"{folder / pattern}: no such file; {folder} holds: {there or 'nothing'}")
    return matches


def _rows(name: str, path: Path, skipped: Counter[str]) -> Iterator[Record | Reject]:
    try:
        form, blocks = open_blocks(path)
    except FileBroken as broken:
        return iter((Reject(f"{name}:1", broken.reason, broken.detail),))
    match form:
        case "lines":
            return line_rows(name, blocks, skipped)
        case "array":
            return array_rows(name, blocks)
        case "csv":
            return csv_rows(name, blocks, ",", skipped)
        case "tsv":
            return csv_rows(name, blocks, "\t", skipped)
        case "parquet":
            return parquet_rows(name, path)
