"""Parquet to rows, in batches of bounded size.

Contract: texts byte-equal, integers exact, lists and structs as lists and dicts, maps with text keys as dicts. A null is an
absent key, in a row as in a struct inside it: a columnar file writes every key into every struct, and a template would print
"None" for those that a message never had. A null inside a list stays. A column that JSON has no form for (bytes, times, decimals,
and lists or structs with such in them) is not read; its value is Opaque, which conversion ignores or refuses like any value that
is no text. A row whose text is not UTF-8, or over MAX_RECORD_BYTES, is rejected. Rows are numbered from 1.

Memory: the pages of one batch, not a row group; pre-buffering would hold whole column chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types
import pyarrow.parquet as _parquet  # pyright: ignore[reportMissingTypeStubs]

from pipeline.dataset.reading.record import MAX_RECORD_BYTES, FileBroken, Opaque, Record, Reject, too_long

pa: Any = pyarrow
pq: Any = _parquet
types: Any = pa.types

_BATCH_BYTES = 8 << 20
_MAX_BATCH_ROWS = 256

Convert = Callable[[Any], Any]


def parquet_rows(name: str, path: Path) -> Iterator[Record | Reject]:
    """Rows of a Parquet file."""
    number = 0
    try:
        with path.open("rb") as file:
            for batch, columns in _batches(file):
                for row in _rows(name, number, batch, columns):
                    number += 1
                    yield row
    except FileBroken as broken:
        yield Reject(f"{name}:{number + 1}", broken.reason, broken.detail)


def _batches(file: Any) -> Iterator[tuple[Any, dict[str, Convert | Opaque | None]]]:
    try:
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
        columns = {field.name: _converter(field.type) for field in parquet.schema_arrow}
        if len(columns) != len(parquet.schema_arrow.names):
            raise FileBroken("duplicate_column", "two columns have the same name")
        read = [name for name, convert in columns.items() if not isinstance(convert, Opaque)]
        # A dot in a name given to pyarrow means a field of a struct, so with such names all columns are read.
        named = read if 0 < len(read) < len(columns) and not any("." in name for name in columns) else None
        meta = parquet.metadata
        mean = sum(meta.row_group(g).total_byte_size for g in range(meta.num_row_groups)) // max(1, meta.num_rows)
        size = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(1, mean)))
        for batch in parquet.iter_batches(size, columns=named, use_threads=False):
            yield batch, columns
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:  # pyarrow raises all of these for damage
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the format's
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileBroken("broken_parquet", f"{first}; nothing is read from here on") from error


def _rows(name: str, before: int, batch: Any, columns: dict[str, Convert | Opaque | None]) -> Iterator[Record | Reject]:
    if batch.num_rows > 1:
        try:
            if batch.nbytes > MAX_RECORD_BYTES:
                raise UnicodeError  # one of them may be too long: look at each by itself
            values = _values(batch, columns)
        except (UnicodeError, _DoubleKey):
            for index in range(batch.num_rows):
                yield from _rows(name, before + index, batch.slice(index, 1), columns)
            return
        for index, value in enumerate(values, start=before + 1):
            yield Record(f"{name}:{index}", value)
        return
    place = f"{name}:{before + 1}"
    if batch.nbytes > MAX_RECORD_BYTES:
        yield too_long(place, batch.nbytes)
        return
    try:
        (value,) = _values(batch, columns)
    except UnicodeError:
        yield Reject(place, "invalid_utf8", "the row holds bytes that are not UTF-8")
    except _DoubleKey as error:
        yield Reject(place, "duplicate_key", str(error))
    else:
        yield Record(place, value)


def _values(batch: Any, columns: dict[str, Convert | Opaque | None]) -> list[dict[str, Any]]:
    rows = [dict[str, Any]() for _ in range(batch.num_rows)]
    read = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, convert in columns.items():
        if isinstance(convert, Opaque):
            for row in rows:
                row[name] = convert
            continue
        for row, value in zip(rows, read[name].to_pylist(), strict=True):
            if value is not None:
                row[name] = value if convert is None else convert(value)
    return rows


class _DoubleKey(Exception):
    """A map that holds a key twice."""


def _converter(kind: Any) -> Convert | Opaque | None:
    """What turns pyarrow's Python value into a row's; None if it is one already."""
    if types.is_dictionary(kind):
        return _converter(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if text or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind):
        return None
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        inner = {field.name: _converter(field.type) for field in fields}
        if len(inner) != len(fields):
            raise FileBroken("duplicate_column", "two fields of a struct have the same name")
        return Opaque(str(kind)) if any(isinstance(c, Opaque) for c in inner.values()) else _struct(inner)
    if types.is_map(kind):
        inner = {field: _converter(field) for field in (kind.key_type, kind.item_type)}
        is_text = types.is_string(kind.key_type) or types.is_large_string(kind.key_type)
        item = inner[kind.item_type]
        return Opaque(str(kind)) if not is_text or isinstance(item, Opaque) else _map(item)
    nested = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    if any(getattr(types, test)(kind) for test in nested):
        item = _converter(kind.value_type)
        return Opaque(str(kind)) if isinstance(item, Opaque) else None if item is None else _list(item)
    return Opaque(str(kind))


def _struct(inner: dict[str, Any]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        found = dict[str, Any]()
        for key, item in value.items():
            if item is not None:
                apply = inner[key]
                found[key] = item if apply is None else apply(item)
        return found

    return convert


def _list(item: Convert) -> Convert:
    return lambda values: [None if value is None else item(value) for value in values]


def _map(item: Convert | None) -> Convert:
    def convert(pairs: Any) -> dict[str, Any]:
        listed = cast("list[tuple[str, Any]]", list(pairs))
        found = {key: value if item is None or value is None else item(value) for key, value in listed}
        if len(found) != len(listed):
            raise _DoubleKey("a map holds a key twice")
        return found

    return convert
