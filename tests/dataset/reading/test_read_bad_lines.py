"""Whatever a line or a file holds: it is read to the byte, or it is one reject with its place and the right reason.

Would catch: a traceback, a row that vanishes, a value that comes out changed, a bad line that costs its neighbours, a file whose
second half is silently missing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset.reading import json_rows, json_scan
from pipeline.dataset.reading.read import ENDS_FILE, Record, Reject, read_rows
from tests.dataset.reading.bad_lines import CSV, READ, REFUSED

pytestmark = pytest.mark.unit


def test_there_are_enough_kinds() -> None:
    assert len({line for line, _ in REFUSED} | {line for line, _ in READ}) >= 200


def _exact(value: object) -> str:
    """Tells 1 from 1.0 and True, and 0.0 from -0.0."""
    return repr(value)


def test_a_file_of_bad_lines(tmp_path: Path) -> None:
    """Every kind in one file, each between two good lines that must stay what they are."""
    cases: list[tuple[bytes, str | dict[str, Any]]] = [*REFUSED, *READ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"good": -1}\n' + b"".join(line + b'\n{"good": %d}\n' % n for n, (line, _) in enumerate(cases)))
    rows = list(read_rows(path))
    assert [row.place for row in rows] == [f"bad.jsonl:{n}" for n in range(1, 2 * len(cases) + 2)]
    assert [_exact(r.value) if isinstance(r, Record) else r for r in rows[::2]] == [
        _exact({"good": n}) for n in range(-1, len(cases))
    ]
    for (line, expected), row in zip(cases, rows[1::2], strict=True):
        if isinstance(row, Reject):
            assert row.reason == expected, line[:60]
            assert row.reason not in ENDS_FILE
            assert row.detail.isprintable()
        else:
            assert _exact(row.value) == _exact(expected), line[:60]


@pytest.mark.parametrize(("line", "reason"), REFUSED, ids=lambda v: v if isinstance(v, str) else repr(v[:24]))
def test_a_bad_row_of_an_array_costs_itself_or_says_that_it_costs_the_rest(line: bytes, reason: str, tmp_path: Path) -> None:
    """What comes before is read. After it either all is read, or nothing and the reject says so."""
    path = tmp_path / "bad.json"
    path.write_bytes(b'[{"good": 1}, ' + line + b', {"good": 2}, {"good": 3}]')
    first, *rest = read_rows(path)
    assert first == Record("bad.json:1", {"good": 1})
    values = [row.value for row in rest if isinstance(row, Record)]
    rejects = [row for row in rest if isinstance(row, Reject)]
    if rejects and rejects[-1].reason in ENDS_FILE:
        assert rest[-1] == rejects[-1]
        assert all(v in ({"a": 1}, {"a": 2}) for v in values)  # the two objects that some lines hold
    elif rejects:
        assert [r.reason for r in rejects] == [reason]
        assert values == [{"good": 2}, {"good": 3}]
    else:
        assert line == b'{"a": 1}, {"a": 2}'  # two rows in an array


@pytest.mark.parametrize(("line", "reason"), CSV, ids=lambda v: v if isinstance(v, str) else repr(v[:24]))
def test_a_bad_line_of_a_csv_file(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"a,b,c\nx,y,z\n" + line + b"\nu,v,w\n")
    before, bad, after = read_rows(path)
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("bad.csv:3", reason)
    assert (before, after) == (
        Record("bad.csv:2", {"a": "x", "b": "y", "c": "z"}),
        Record(f"bad.csv:{4 + line.count(bytes((10,)))}", {"a": "u", "b": "v", "c": "w"}),
    )


@pytest.mark.parametrize(
    "line",
    [b'"1,2,3', b'1,"2,3', b'1,2,"3\n4" 5', b'1,2,"never\n\n\n closed', b'x,"5"" disk,z'],
    ids=lambda v: repr(v[:24]),
)
def test_a_quote_that_may_still_be_open_ends_a_csv_file(line: bytes, tmp_path: Path) -> None:
    """With one column any text is a row: to go on would hand out pieces of a text as rows."""
    path = tmp_path / "bad.csv"
    path.write_bytes(b"a,b,c\nx,y,z\n" + line + b'\nu,v,w\nquoted,"cell",w\n')
    before, bad = read_rows(path)
    assert before == Record("bad.csv:2", {"a": "x", "b": "y", "c": "z"})
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("bad.csv:3", "broken_csv")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a,b,a\n1,2,3\n", "duplicate_column"),
        (b",,\n1,2,3\n", "duplicate_column"),
        (b"a,\xff\n1,2\n", "broken_csv"),
        (b'a,"b\n1,2\n', "broken_csv"),
        (b'"a"b,c\n1,2\n', "broken_csv"),
        (b"a,b\n", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"a,b\r1,2\r", "broken_csv"),
        ("a,b\n1,2\n".encode("utf-16"), "unsupported_file"),
    ],
    ids=repr,
)
def test_a_csv_file_without_usable_column_names(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    (bad,) = read_rows(path)
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("bad.csv:1", reason)


GOOD = b"".join(b'{"a": %d}\n' % n for n in range(150_000))


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _flipped(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes((content[len(content) // 2] ^ 0xFF,)) + content[len(content) // 2 + 1 :]


GZIP, ZSTD = gzip.compress(GOOD, 1), _zstd(GOOD)
ARRAY = gzip.compress(b"[" + GOOD[:-1].replace(b"\n", b",") + b"]", 1)


@pytest.mark.parametrize(
    ("content", "least"),
    [
        (GZIP[: len(GZIP) // 2], 70_000),
        (GZIP[:-1], 150_000),
        (GZIP + GZIP[:1000], 150_000),
        (ZSTD[: len(ZSTD) // 2], 30_000),
        (ZSTD[:-1], 120_000),
        (ARRAY[: len(ARRAY) // 2], 70_000),
        (ARRAY[:-1], 150_000),
        (GZIP[:5], 0),
        (ZSTD[:5], 0),
    ],
    ids=lambda v: str(len(v)) if isinstance(v, bytes) else "",
)
def test_a_compressed_file_that_is_cut_is_read_up_to_there(content: bytes, least: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    *rows, broken = read_rows(path)
    assert isinstance(broken, Reject)
    assert (broken.place, broken.reason) == (f"rows.jsonl.gz:{len(rows) + 1}", "cut_file")
    assert [r.value for r in rows if isinstance(r, Record)] == [{"a": n % 150_000} for n in range(len(rows))]
    assert least <= len(rows) < 151_000
    assert broken.reason in ENDS_FILE


@pytest.mark.parametrize(
    "content",
    [
        _flipped(GZIP),
        GZIP[:-8] + bytes((GZIP[-8] ^ 1,)) + GZIP[-7:],
        GZIP + b"more",
        b"\x1f\x8b but no gzip",
        ZSTD + b"more",
        b"\x28\xb5\x2f\xfd but no zstd",
        _flipped(ARRAY),
    ],
    ids=lambda v: str(len(v)),
)
def test_a_compressed_file_that_is_damaged_gives_no_row(content: bytes, tmp_path: Path) -> None:
    """A flipped bit changes digits of rows that are still JSON; the checksum that tells comes after them."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    (broken,) = read_rows(path)
    assert isinstance(broken, Reject)
    assert (broken.place, broken.reason) == ("rows.jsonl:1", "broken_file")
    assert broken.reason in ENDS_FILE


def _parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"a": [f"text {n}" for n in range(50_000)]}), path, use_dictionary=False, row_group_size=10_000)
    return path.read_bytes()


def test_a_parquet_file_that_breaks(tmp_path: Path) -> None:
    content = _parquet(tmp_path / "whole")
    for name, broken in (("cut", content[:-9]), ("head", content[:4]), ("no mark.parquet", content[4:])):
        (tmp_path / name).write_bytes(broken)
        (row,) = read_rows(tmp_path / name)
        assert isinstance(row, Reject)
        assert (row.place, row.reason) == (f"{name}:1", "broken_parquet")
    middle = len(content) // 2
    (tmp_path / "hole").write_bytes(content[:middle] + b"\xff" * 20_000 + content[middle + 20_000 :])
    *rows, last = read_rows(tmp_path / "hole")
    assert isinstance(last, Reject)
    assert (last.place, last.reason) == (f"hole:{len(rows) + 1}", "broken_parquet")
    assert [r.value for r in rows if isinstance(r, Record)] == [{"a": f"text {n}"} for n in range(len(rows))]


def test_a_parquet_page_whose_checksum_does_not_match_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"a": ["one text", "another"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"another", b"Another", 1))
    (row,) = read_rows(path)
    assert isinstance(row, Reject)
    assert (row.place, row.reason) == ("rows.parquet:1", "broken_parquet")


def test_parquet_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    pq.write_table(table, tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert isinstance(row, Reject)
    assert (row.place, row.reason) == ("rows.parquet:1", "duplicate_column")


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert isinstance(row, Reject)
    assert row.reason == "empty_file"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04 and so on", "zip"),
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\x00\x00", "xz"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-be").join([b"\xfe\xff", b""]), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (gzip.compress(gzip.compress(b"{}")), "twice"),
        (gzip.compress(b"PAR1 and so on"), "Parquet inside gzip"),
        (gzip.compress(b"name".ljust(257, b"\0") + b"ustar\0" + b"\0" * 200), "tar"),
        (b"PARE and so on", "encrypted"),
        (b"ARROW1\0\0", "Arrow"),
    ],
    ids=lambda v: v if isinstance(v, str) else repr(v[:12]),
)
def test_a_kind_of_file_that_is_not_read(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    (row,) = read_rows(path)
    assert isinstance(row, Reject)
    assert (row.place, row.reason) == ("rows.jsonl:1", "unsupported_file")
    assert says in row.detail


@pytest.mark.parametrize("form", ["lines", "array", "csv"])
def test_a_row_over_the_limit_is_passed_by_and_its_size_told(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "MAX_RECORD_BYTES", 3 << 20)
    exact, over = (b'{"a": "' + b"x" * (size - 9) + b'"}' for size in (3 << 20, (3 << 20) + 1))
    path = tmp_path / {"lines": "rows.jsonl", "array": "rows.json", "csv": "rows.csv"}[form]
    if form == "csv":
        path.write_bytes(b"a\nx\n" + over + b"\ny\n")
        first, bad = read_rows(path)
        assert first == Record("rows.csv:2", {"a": "x"})
        assert isinstance(bad, Reject)
        assert (bad.place, bad.reason) == ("rows.csv:3", "broken_csv")
        return
    rows = [b"{}", exact, over, over + b" " if form == "lines" else over, b"{}", over]
    path.write_bytes(b"\n".join(rows) if form == "lines" else b"[" + b",".join(rows) + b"]")
    told = [(r.place.partition(":")[2], r.reason if isinstance(r, Reject) else len(str(r.value))) for r in read_rows(path)]
    assert told == [
        ("1", 2),
        ("2", 3 << 20),
        ("3", "too_long"),
        ("4", "too_long"),
        ("5", 2),
        ("6", "too_long"),
    ]


_PEAK = """
import resource, sys
from pathlib import Path
from pipeline.dataset.reading.read import read_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reasons = [getattr(row, "reason", "row") for row in read_rows(Path(sys.argv[1]))]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, *reasons[:3], len(reasons))
"""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    """A row of 200 MB, then 100 MB of rows: the peak is that of the longest row that is held, 64 MiB and its copies."""
    row = b'{"a": "' + b"x" * 990 + b'"}'
    between = b"\n" if name == "rows.jsonl" else b","
    with (tmp_path / name).open("wb") as file:
        file.write((b"" if name == "rows.jsonl" else b"[") + row + between + b'{"a": "')
        for _ in range(200):
            file.write(b"y" * 1_000_000)
        file.write(b'"}')
        for _ in range(100):
            file.write((between + row) * 1000)
        file.write(b"" if name == "rows.jsonl" else b"]")
    ended = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path / name)], capture_output=True, text=True, check=True)
    growth, *reasons, count = ended.stdout.split()
    assert (reasons, count) == (["row", "too_long", "row"], "100002")
    assert int(growth) < 100 * 1024  # KiB; to hold the file would take 300 MB


@pytest.mark.parametrize("limit", ["MAX_BRACKETS", "MAX_COMMAS"])
def test_a_row_of_too_many_values(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, limit, 200 if limit == "MAX_BRACKETS" else 198)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": [' + b"{}," * 198 + b"1]}\n" + b'{"a": [' + b"{}," * 199 + b"1]}\n{}\n")
    first, bad, last = read_rows(path)
    assert isinstance(bad, Reject)
    assert bad.reason == "too_many_values"
    assert (len(first.value["a"]) if isinstance(first, Record) else first, last) == (199, Record("rows.jsonl:3", {}))


_MUTATIONS: list[bytes] = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"NaN",
    b"1e999",
    b"\xef\xbb\xbf",
]


def _mutated(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randrange(1, 30)]
            case 2:
                changed[at:at] = rng.choice(_MUTATIONS)
            case _:
                changed[at:at] = changed[rng.randrange(len(changed)) :][:50]
        changed = changed or bytearray(b"\n")
    return bytes(changed[: rng.randrange(1, len(changed) + 1)] if rng.random() < 0.2 else changed)


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.jsonl.gz", "rows.csv.zst", "rows.parquet"]
)
def test_no_damage_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    """300 damaged copies of a file: rows and rejects in order, and nothing after a reject that ends the file."""
    rng = random.Random(name)
    values = [{"instruction": f'第{n}行 "{n}"\n{{}}', "input": "", "output": f"[{n}], 😀\t"} for n in range(12)]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(values[0]), delimiter="\t" if ".tsv" in name else ",")
    writer.writeheader()
    writer.writerows(values)
    content = table.getvalue().encode()
    if ".jsonl" in name:
        content = "".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values).encode()
    elif ".json" in name:
        content = json.dumps(values, ensure_ascii=False, indent=1).encode()
    elif ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(values), tmp_path / "whole")
        content = (tmp_path / "whole").read_bytes()
    content = gzip.compress(content) if name.endswith(".gz") else _zstd(content) if name.endswith(".zst") else content
    path = tmp_path / name
    path.write_bytes(content)
    assert [r.value for r in read_rows(path) if isinstance(r, Record)] == values
    for _ in range(300):
        path.write_bytes(_mutated(content, rng))
        *rows, last = read_rows(path)
        assert last.place.startswith(f"{name}:")
        for row in (*rows, last):
            if isinstance(row, Reject):
                assert row.reason not in ENDS_FILE or row is last
                assert row.detail.isprintable()
