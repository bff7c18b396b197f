"""CSV text to rows, every cell a text.

Contract: the first record names the columns; a row is a dict of its cells. No cell is taken for a number, a date, a truth value
or a null: an empty cell is an empty text. The separator is a comma (`.csv`) or a tab (`.tsv`), never guessed. A cell may be
quoted with `"`, doubled inside, and then holds line ends as they are. Records end at LF or CRLF; empty lines are no rows.
Refused: a row with more or fewer cells than columns (`ragged_row`), bytes that are not UTF-8, quotes that do not pair. After a
quote that may still be open, what is text and what is structure is a guess, so the file ends there (`broken_csv`).
What cannot be seen: a last line cut inside of its last cell.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator

from pipeline.dataset.reading.json_scan import lines
from pipeline.dataset.reading.record import MAX_RECORD_BYTES, FileBroken, Record, Reject, printable
from pipeline.dataset.reading.source import BOM


def csv_rows(name: str, blocks: Iterator[bytes], delimiter: str, skipped: Counter[str]) -> Iterator[Record | Reject]:
    """Rows of a CSV file; the place of one is the line on which it begins."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))  # of the process; the module's own is 131,072
    source = _Lines(blocks)
    reader = csv.reader(source, delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        source.begin()
        place = f"{name}:{source.number + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = printable(str(error))  # which names the separator as it is
            if source.may_be_open or columns is None:
                yield Reject(place, "broken_csv", f"{what}; where the next row begins is not known, so none is read")
                return
            yield Reject(place, "broken_quotes", what)
            continue
        except FileBroken as broken:
            yield Reject(place, broken.reason, broken.detail)
            return
        if not cells:
            skipped["blank_lines"] += 1
        elif columns is None:
            if source.invalid or len(set(cells)) != len(cells):
                double = next((c for c in cells if cells.count(c) > 1), "")
                what = "the column names are not UTF-8" if source.invalid else f"two columns are named {double[:60]!r}"
                yield Reject(place, "broken_csv" if source.invalid else "duplicate_column", what)
                return
            columns = cells
        elif source.invalid:
            yield Reject(place, "invalid_utf8", "the row holds bytes that are not UTF-8")
        elif len(cells) != len(columns):
            yield Reject(place, "ragged_row", f"{len(cells)} cells for {len(columns)} columns")
        else:
            yield Record(place, dict(zip(columns, cells, strict=True)))


class _Lines:
    """Lines as the csv module takes them, and what it does not tell of the record that they make up."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._lines = lines(blocks)
        self.number = 0
        self.begin()

    def begin(self) -> None:
        self.invalid = False
        self._first, self._size, self._quotes = self.number + 1, 0, 0

    @property
    def may_be_open(self) -> bool:
        """False for a single line whose quotes are even: what it began it also ended."""
        return self.number > self._first or self._quotes % 2 == 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        self._size += line if isinstance(line, int) else len(line) + 1
        if isinstance(line, int) or self._size > MAX_RECORD_BYTES:
            raise FileBroken(
                "broken_csv",
                f"more than {MAX_RECORD_BYTES:,} bytes up to line {self.number}; is a quote left open? No row follows",
            )
        if self.number == 1:
            line = line.removeprefix(BOM)
        self._quotes += line.count(b'"')
        try:
            return line.decode("utf-8") + "\n"
        except UnicodeDecodeError:
            self.invalid = True  # the record is still read to its end, so that the next begins where it does
            return line.decode("utf-8", "surrogateescape") + "\n"
