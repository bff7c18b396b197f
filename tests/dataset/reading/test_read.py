"""Raw files to records.

Would catch: a first row lost to a byte-order mark, a text broken at U+2028, rows that vanish without a reject, a wrong
line number, a bad row that ends the job, text that is not what the file holds, a file list that depends on the machine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config.errors import DataError
from pipeline.dataset.reading import source
from pipeline.dataset.reading.read import ENDS_FILE, Record, Reject, find_files, read_rows

pytestmark = pytest.mark.unit

TEXT = '雪 ❄️ é\u2028next\u2029\x85\x0b\x1c tab\t quote" back\\slash  '


def _rows(path: Path, content: bytes) -> list[Record | Reject]:
    path.write_bytes(content)
    return list(read_rows(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_text_is_unchanged(path: Path) -> None:
    """Raw U+2028, U+2029 and U+0085 are text: only LF ends a line."""
    line = json.dumps({"a": TEXT}, ensure_ascii=False)
    assert "\u2028" in line
    assert _rows(path, f"{line}\n{line}\n".encode()) == [Record("rows.jsonl:1", {"a": TEXT}), Record("rows.jsonl:2", {"a": TEXT})]


def test_mark_crlf_blank_lines_and_no_last_newline(path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \t\r\n{"a": 2}\r\n\n{"a": 3}'
    assert _rows(path, content) == [
        Record("rows.jsonl:1", {"a": 1}),
        Record("rows.jsonl:4", {"a": 2}),
        Record("rows.jsonl:6", {"a": 3}),
    ]


def test_mark_is_removed_at_the_beginning_only(path: Path) -> None:
    first, second = _rows(path, '{"a": 1}\n\ufeff{"a": 2}\n'.encode())
    assert isinstance(first, Record)
    assert isinstance(second, Reject)
    assert (second.place, second.reason) == ("rows.jsonl:2", "broken_json")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": "cut off he', "broken_json"),
        (b'{"a": 1} {"a": 2}', "broken_json"),
        (b"{'a': 1}", "broken_json"),
        (b'{"a": NaN}', "not_a_number"),
        (b'{"a": -Infinity}', "not_a_number"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        ('{"a": "é"}'.encode("latin-1"), "invalid_utf8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8"),
        (b"null", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"3", "not_an_object"),
        (b"[1]", "not_an_object"),
        (b"[" * 100_000, "too_deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "number_out_of_range"),
        (b"\x00", "broken_json"),
    ],
    ids=lambda v: v if isinstance(v, str) else repr(v[:24]),
)
def test_a_bad_line_is_a_reject_and_the_next_is_read(line: bytes, reason: str, path: Path) -> None:
    before, bad, after = _rows(path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("rows.jsonl:2", reason)
    assert bad.detail
    assert (before, after) == (Record("rows.jsonl:1", {"a": 1}), Record("rows.jsonl:3", {"a": 2}))


def test_constants_are_text_inside_text(path: Path) -> None:
    assert _rows(path, b'{"a": "NaN Infinity"}\n') == [Record("rows.jsonl:1", {"a": "NaN Infinity"})]


def test_half_a_surrogate_pair_is_left_to_conversion(path: Path) -> None:
    (row,) = _rows(path, b'{"a": "\\ud83d"}\n')
    assert row == Record("rows.jsonl:1", {"a": "\ud83d"})


def test_a_whole_surrogate_pair_is_one_character(path: Path) -> None:
    assert _rows(path, b'{"a": "\\ud83d\\ude00"}\n') == [Record("rows.jsonl:1", {"a": "😀"})]


def test_a_huge_line_is_a_row_like_any_other(path: Path) -> None:
    """30 MB: larger than the blocks in which columnar readers take a file."""
    huge = "雪" * 10_000_000
    first, second, third = _rows(path, f'{{"a": 1}}\n{{"a": "{huge}"}}\n{{"a": 3}}\n'.encode())
    assert isinstance(second, Record)
    assert second.value["a"] == huge
    assert (first.place, second.place, third.place) == ("rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3")


@pytest.mark.parametrize("lead", [b"", b"\xef\xbb\xbf", b"\r\n \t", b"\xef\xbb\xbf\n"])
def test_array_file(lead: bytes, path: Path) -> None:
    content = json.dumps([{"a": TEXT}, 3, {"a": 2}], ensure_ascii=False, indent=1).encode()
    first, bad, last = _rows(path, lead + content)
    assert first == Record("rows.jsonl:1", {"a": TEXT})
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("rows.jsonl:2", "not_an_object")
    assert last == Record("rows.jsonl:3", {"a": 2})


@pytest.mark.parametrize(
    ("content", "place", "detail"),
    [
        (b'[{"a": 1},', 2, "the file ends before the array does"),
        (b'[{"a": 1}, {"a": 2', 2, "the file ends inside of a row"),
        (b'[{"a": 1}]\n{"a": 2}', 2, "byte 11: the array has ended, found '{'"),
        (b'[{"a": 1}]]', 2, "the array has ended"),
        (b'[{"a": 1}, ]', 2, "byte 11: an element expected, found ']'"),
        (b'[{"a": 1} {"a": 2}]', 2, "byte 10: , or ] expected, found '{'"),
        (b'[{"a": 1},, {"a": 2}]', 2, "an element expected, found ','"),
        (b'[{"a": 1}, {"a": 2}}, {"a": 3}]', 3, "found '}'"),
        (b'[{"a": 1}, {"a": "he said "yes""}, {"a": 3}]', 2, "where the next row begins is not known"),
        (b'[{"a": 1}, {"a": 2], {"a": 3}]', 2, "where the next row begins is not known"),
        (b'[{"a": 1}, nul, {"a": 3}]', 2, "where the next row begins is not known"),
        (b'[{"a": 1}, ' + b"[" * 100_000, 2, "the file ends inside of a row"),
        (b'[{"a": 1}, ' + b"[" * 100_000 + b"]" * 100_000 + b"]", 2, "nested"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_where_an_array_breaks_it_ends(content: bytes, place: int, detail: str, path: Path) -> None:
    """What comes before is read, what comes after never is, and one reject stands for it."""
    *rows, broken = _rows(path, content)
    assert rows == [Record(f"rows.jsonl:{n}", {"a": n}) for n in range(1, place)]
    assert isinstance(broken, Reject)
    assert (broken.place, broken.reason) == (f"rows.jsonl:{place}", "broken_array")
    assert broken.reason in ENDS_FILE
    assert detail in broken.detail


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (b'{"a": NaN}', "not_a_number"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": 1, "a": 2}', "duplicate_key"),
        (b'{"a": "two\nlines"}', "control_character"),
        (b'{"a": 1e999}', "number_out_of_range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "number_out_of_range"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "too_deep"),
        (b'"{\\"a\\": 1}"', "not_an_object"),
        (b"[[{}], {}]", "not_an_object"),
        (b"true", "not_an_object"),
        (b"null", "not_an_object"),
        (b"-1.5e3", "not_an_object"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_a_row_of_an_array_whose_bounds_are_sure_is_one_reject(element: bytes, reason: str, path: Path) -> None:
    before, bad, after = _rows(path, b'[{"a": 1},' + element + b', {"a": 2}]')
    assert isinstance(bad, Reject)
    assert (bad.place, bad.reason) == ("rows.jsonl:2", reason)
    assert bad.reason not in ENDS_FILE
    assert (before, after) == (Record("rows.jsonl:1", {"a": 1}), Record("rows.jsonl:3", {"a": 2}))


def test_an_array_is_the_same_wherever_blocks_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every small size cut strings, escapes, numbers and characters in two."""
    values: list[object] = [{"a": TEXT}, {"b": [{"c": '[]{}",\\'}, {}], "d": '\\"'}, 12.5, "s\\", {"e": {}}, None, [], {}]
    content = json.dumps(values, ensure_ascii=False, indent=1).encode()
    whole = _rows(path, content)
    assert [r.value for r in whole if isinstance(r, Record)] == [v for v in values if isinstance(v, dict)]
    for size in (*range(1, 20), 64, 100):
        monkeypatch.setattr(source, "BLOCK", size)
        assert list(read_rows(path)) == whole


def test_rows_come_one_by_one(path: Path) -> None:
    """A reader that took the whole file first would not give a row of an endless one."""
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    rows = read_rows(path)
    assert next(rows) == Record("rows.jsonl:1", {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 3}\n')
    assert [r.place for r in rows] == ["rows.jsonl:2", "rows.jsonl:3"]


def test_places_name_the_path_below_the_folder(tmp_path: Path) -> None:
    for name in ("a/rows.jsonl", "b/rows.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}\n3\n")
    files = find_files(tmp_path, ["*/rows.jsonl"])
    places = [row.place for path in files for row in read_rows(path, tmp_path)]
    assert places == ["a/rows.jsonl:1", "a/rows.jsonl:2", "b/rows.jsonl:1", "b/rows.jsonl:2"]


def test_a_place_is_one_line_of_text_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode("雪 \n\u2028".encode() + b"\xff.jsonl")
    path.write_bytes(b"{}")
    (row,) = read_rows(path, tmp_path)
    assert row.place == "雪 \\n\\u2028\\udcff.jsonl:1"


def test_blank_lines_are_counted(path: Path) -> None:
    path.write_bytes(b'\n{"a": 1}\r\n \r\n\n')
    skipped = Counter[str]()
    assert list(read_rows(path, skipped=skipped)) == [Record("rows.jsonl:2", {"a": 1})]
    assert skipped == {"blank_lines": 3}


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]", b"[ ]\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"], ids=repr)
def test_a_file_without_a_row_is_a_reject(content: bytes, path: Path) -> None:
    (row,) = _rows(path, content)
    assert isinstance(row, Reject)
    assert (row.place, row.reason) == ("rows.jsonl:1", "empty_file")


def test_what_the_disk_refuses_ends_the_job_in_one_line(tmp_path: Path) -> None:
    """A file that cannot be read is no bad row: half of the data would be missing for one reject."""
    with pytest.raises(DataError, match=r"gone\.jsonl: No such file or directory"):
        list(read_rows(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        list(read_rows(tmp_path))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "notes.txt"):
        file = tmp_path / "raw" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
    return tmp_path / "raw"


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
        (["*.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["b.jsonl", "*.jsonl"], ["b.jsonl", "a.jsonl"]),
        (["**/*.jsonl"], ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
        (["[ab].jsonl", "sub/*"], ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
    ],
)
def test_files_in_stated_order_each_once(patterns: list[str], names: list[str], raw: Path) -> None:
    assert [p.relative_to(raw).as_posix() for p in find_files(raw, patterns)] == names


def test_a_name_with_glob_characters_is_found_as_it_is(raw: Path) -> None:
    (raw / "rows[1].jsonl").write_text("{}")
    assert [p.name for p in find_files(raw, ["rows[1].jsonl"])] == ["rows[1].jsonl"]


def test_a_pattern_without_a_file_says_what_is_there(raw: Path) -> None:
    with pytest.raises(DataError, match=r"typo\.jsonl: no such file.*a\.jsonl, b\.jsonl, notes\.txt"):
        find_files(raw, ["a.jsonl", "typo.jsonl"])


def test_a_folder_is_no_file(raw: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        find_files(raw, ["sub"])


def test_missing_folder(raw: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_files(raw / "none", ["a.jsonl"])


def test_empty_file(raw: Path) -> None:
    (raw / "b.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.jsonl: 0 bytes"):
        find_files(raw, ["*.jsonl"])


@pytest.mark.parametrize("pattern", ["/etc/hosts", "../outside.jsonl", "sub/../../outside.jsonl", ""])
def test_only_files_below_the_folder(pattern: str, raw: Path) -> None:
    """DVC tracks the raw folder: a file outside of it could change without a stage going stale."""
    (raw.parent / "outside.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="below"):
        find_files(raw, [pattern])
