"""Every form and compression gives back what was written, to the byte.

Would catch: a cell taken for a number, a date or a null, a quoted line end that is changed, a text that stands for another after
an escape, a member of a compressed file that is left out, a key that a columnar file invents, a column type that breaks a file.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset.reading import parquet_rows, source
from pipeline.dataset.reading.read import Opaque, Record, Reject, read_rows

pytestmark = pytest.mark.unit

Row = dict[str, Any]

_PIECES = [
    *(
        "Name the colour of snow. ",
        "把这句话翻译成英文：",
        "りんごを数えてください。",
        "😀👩‍👩‍👧🏳️‍🌈",
        "é",
        "e\u0301",
        "한국어",
        "العربية",
    ),
    *(
        '"',
        '""',
        "'",
        "\\",
        "\\\\",
        '\\"',
        "\\n",
        "\\u0041",
        "{",
        "}",
        "[",
        "]",
        "},{",
        '{"a": 1}',
        ",",
        ";",
        "\t",
        ":",
        '":',
        "#",
    ),
    *("\n", "\r\n", "\r", "\n\n", " ", "  ", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x00", "\x1a", "\x7f", "\x9f"),
    *("\ufeff", "\ufffd", "\uffff", "\U0010ffff", "\u200b", "\u202e", "\ud7ff", "\ue000", "</s>", "<|im_end|>", "&amp;"),
    *(
        "1",
        "007",
        "1e5",
        "12345678901234567890",
        "true",
        "null",
        "NaN",
        "None",
        "2024-01-31",
        "12:00",
        "1,5",
        "=1+1",
        "-0",
        "0x10",
    ),
]


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randrange(12)))


def _texts(seed: int, count: int = 120) -> list[Row]:
    rng = random.Random(seed)
    return [{key: _text(rng) for key in ("instruction", "input", "output")} for _ in range(count)]


def _nested(seed: int, count: int = 120) -> list[Row]:
    rng = random.Random(seed)

    def turn() -> Row:
        made: Row = {"role": rng.choice(["user", "assistant"]), "content": _text(rng)}
        if rng.random() < 0.3:
            made["calls"] = [{"name": _text(rng), "index": rng.randrange(-(2**63), 2**63)} for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.3:
            made["weight"] = rng.choice([0.0, 0.5, 1.0, rng.random()])
        return made

    rows: list[Row] = []
    for number in range(count):
        row: Row = {"messages": [turn() for _ in range(rng.randrange(1, 5))]}
        if number > count // 2:  # a column that appears late
            row["system"] = _text(rng)
        if rng.random() < 0.5:
            row["seen"] = rng.random() < 0.5
        rows.append(row)
    return rows


def _cell(text: str, rng: random.Random, delimiter: str) -> str:
    quoted = any(c in text for c in (delimiter, '"', "\n", "\r")) or not text or rng.random() < 0.3
    return '"' + text.replace('"', '""') + '"' if quoted else text


def _csv(rows: list[Row], seed: int, delimiter: str, end: str) -> bytes:
    rng = random.Random(seed)
    lines = [list(rows[0]), *([row[key] for key in rows[0]] for row in rows)]
    return "".join(delimiter.join(_cell(c, rng, delimiter) for c in line) + end for line in lines).encode()


def _lines(rows: list[Row], **how: Any) -> bytes:
    return "".join(json.dumps(row, **how) + "\n" for row in rows).encode()


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


JSON_FORMS: dict[str, Callable[[list[Row]], bytes]] = {
    "escaped.jsonl": lambda rows: _lines(rows),
    "plain.jsonl": lambda rows: _lines(rows, ensure_ascii=False),
    "dense.jsonl": lambda rows: _lines(rows, ensure_ascii=False, separators=(",", ":")),
    "crlf.jsonl": lambda rows: b"\xef\xbb\xbf" + _lines(rows, ensure_ascii=False).replace(b"\n", b"\r\n"),
    "array.json": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "escaped.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: b"\xef\xbb\xbf\r\n" + json.dumps(rows, ensure_ascii=False, indent=4).encode() + b"\r\n",
    "lies.json": lambda rows: _lines(rows, ensure_ascii=False),
    "lies.jsonl": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "lies.parquet": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "none": lambda rows: _lines(rows),
}
CSV_FORMS: dict[str, Callable[[list[Row]], bytes]] = {
    "rows.csv": lambda rows: _csv(rows, 1, ",", "\n"),
    "crlf.CSV": lambda rows: b"\xef\xbb\xbf" + _csv(rows, 2, ",", "\r\n"),
    "rows.tsv": lambda rows: _csv(rows, 3, "\t", "\n"),
}
COMPRESSIONS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "zstd": (".zst", _zstd),
    "gzip members": (".gz", lambda c: gzip.compress(c[: len(c) // 3]) + gzip.compress(b"") + gzip.compress(c[len(c) // 3 :])),
    "zstd frames": (".zst", lambda c: b"\x50\x2a\x4d\x18\x04\0\0\0skip" + _zstd(c[:999]) + _zstd(b"") + _zstd(c[999:])),
    "gzip, and the name does not say so": ("", gzip.compress),
    "none, and the name says gzip": (".gz", lambda content: content),
}


def _values(path: Path) -> list[Row]:
    rows = list(read_rows(path))
    assert [r for r in rows if isinstance(r, Reject)] == []
    return [row.value for row in rows if isinstance(row, Record)]


def _written(form: str) -> tuple[list[Row], bytes]:
    rows = _texts(zlib.crc32(form.encode())) + (_nested(7) if form in JSON_FORMS else [])
    return rows, (JSON_FORMS | CSV_FORMS)[form](rows)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", [*JSON_FORMS, *CSV_FORMS])
def test_compressed_rows_come_back_byte_equal(form: str, compression: str, tmp_path: Path) -> None:
    rows, content = _written(form)
    suffix, compress = COMPRESSIONS[compression]
    path = tmp_path / (form + suffix)
    path.write_bytes(compress(content))
    assert _values(path) == rows


@pytest.mark.parametrize("block", [16, 97, 1 << 20])
@pytest.mark.parametrize("form", [*JSON_FORMS, *CSV_FORMS])
def test_rows_come_back_byte_equal(form: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, content = _written(form)
    (tmp_path / form).write_bytes(content)
    monkeypatch.setattr(source, "BLOCK", block)
    assert _values(tmp_path / form) == rows


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str
)
def test_parquet_texts_come_back_byte_equal(kind: pa.DataType, tmp_path: Path) -> None:
    rows = _texts(11, count=700)
    columns = {key: pa.array([row[key] for row in rows]).cast(kind) for key in rows[0]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=300)
    assert _values(tmp_path / "rows.parquet") == rows


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_parquet_rows_are_those_of_json(compression: str, tmp_path: Path) -> None:
    """Keys that a row lacks stay absent at every level, though a columnar file has them everywhere."""
    rows = _nested(5, count=600)
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), tmp_path / "rows", compression=compression, row_group_size=250)
    assert _values(tmp_path / "rows") == rows


def _schema() -> pa.Schema:
    call = pa.struct({"name": pa.string(), "index": pa.int64()})
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "calls": pa.list_(call), "weight": pa.float64()})
    return pa.schema({"messages": pa.list_(turn), "system": pa.string(), "seen": pa.bool_()})


def test_parquet_nulls_lists_maps_and_long_integers(tmp_path: Path) -> None:
    table = pa.table(
        {
            "late": pa.array([None, None, "text"], pa.string()),
            "never": pa.nulls(3),
            "list": pa.array([["a", None], [], None], pa.large_list(pa.string())),
            "map": pa.array([[("k", "v"), ("n", None)], [], None], pa.map_(pa.string(), pa.string())),
            "inner": pa.array([{"x": None, "y": {"z": None}}, {"x": [None], "y": None}, None]),
            "long": pa.array([2**64 - 1, 0, None], pa.uint64()),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert _values(tmp_path / "rows.parquet") == [
        {"list": ["a", None], "map": {"k": "v", "n": None}, "inner": {"y": {}}, "long": 2**64 - 1},
        {"list": [], "map": {}, "inner": {"x": [None]}, "long": 0},
        {"late": "text"},
    ]


def test_parquet_columns_without_a_json_form_are_opaque(tmp_path: Path) -> None:
    """They are neither turned into text nor left out unseen, and do not break the rows beside them."""
    table = pa.table(
        {
            "output": ["a", "b"],
            "image": pa.array([{"bytes": b"\xff", "path": "x"}, None]),
            "raw": pa.array([b"text", b"\xff"]),
            "when": pa.array([1, 2], pa.timestamp("ns", tz="UTC")),
            "day": [datetime.date(2024, 1, 31), None],
            "price": [decimal.Decimal("1.10"), None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    first, second = _values(tmp_path / "rows.parquet")
    assert first == second | {"output": "a"}
    assert second.pop("output") == "b"
    assert {name: value.type for name, value in second.items()} == {n: str(table.schema.field(n).type) for n in second}
    assert all(isinstance(value, Opaque) for value in second.values())


def test_a_parquet_row_that_is_not_utf8_is_one_reject(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"bad \xff", b"also good"]).view(pa.string())
    pq.write_table(pa.table({"a": texts}), tmp_path / "rows.parquet")
    first, bad, last = read_rows(tmp_path / "rows.parquet")
    assert (first, last) == (Record("rows.parquet:1", {"a": "good"}), Record("rows.parquet:3", {"a": "also good"}))
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("rows.parquet:2", "invalid_utf8")


def test_a_parquet_row_over_the_limit_is_one_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_RECORD_BYTES", 1000)
    pq.write_table(pa.table({"a": ["x", "y" * 2000, "z"]}), tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    assert [row.reason if isinstance(row, Reject) else row.value["a"] for row in rows] == ["x", "too_long", "z"]


def test_a_map_with_a_double_key_is_one_reject(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    pq.write_table(pa.table({"a": pa.array([[("k", 1)], [("k", 1), ("k", 2)]], kind)}), tmp_path / "rows.parquet")
    first, second = read_rows(tmp_path / "rows.parquet")
    assert first == Record("rows.parquet:1", {"a": {"k": 1}})
    assert isinstance(second, Reject)
    assert second.reason == "duplicate_key"


def test_csv_places_are_the_lines_on_which_rows_begin(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\r\n1,"two\r\nlines"\r\n\r\n,""\r\nlast,row')
    assert list(read_rows(path)) == [
        Record("rows.csv:2", {"a": "1", "b": "two\r\nlines"}),
        Record("rows.csv:5", {"a": "", "b": ""}),
        Record("rows.csv:6", {"a": "last", "b": "row"}),
    ]
