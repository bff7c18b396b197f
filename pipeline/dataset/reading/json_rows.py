"""JSON text to rows: one object per line, or one array that is never held whole.

Contract: a row is the parsed object, texts byte-equal, integers exact, other numbers as IEEE doubles. Refused, each with its
reason: what is no JSON (`broken_json`), bytes that are not UTF-8, raw control characters in a text, a key that stands twice in
one object (which of the two is meant is a guess), NaN and infinities, numbers that no double and no 4,300 digits hold, values
nested deeper than MAX_DEPTH, rows that are no object, rows over MAX_RECORD_BYTES, MAX_BRACKETS or MAX_COMMAS. Half a surrogate
pair is left to conversion.
Only LF ends a line; a byte-order mark at the start and CR before LF are accepted; lines of white space are no rows.

Measured on alpaca rows of 740 bytes, one core: all rules on the stdlib decoder 3.4 us a row (3.1 us without a rule); orjson
0.9 us, but it keeps the last of two keys and turns long integers into floats: with checks for these, 4.0 us.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from pipeline.dataset.reading.json_scan import elements, lines
from pipeline.dataset.reading.record import FileBroken, Record, Reject, too_long
from pipeline.dataset.reading.source import BOM

MAX_DEPTH = 100
"""Levels of objects and arrays in a row; real rows have six. Python's own limit depends on who calls."""

MAX_BRACKETS = 1_000_000
"""Opening brackets in a row, those in its texts included: 64 MiB of `{},` would take 2 GiB once parsed."""
MAX_COMMAS = 4_000_000
"""Commas in a row, those in its texts included: 64 MiB of `"ab",` would take 1.2 GiB once parsed."""


def line_rows(name: str, blocks: Iterator[bytes], skipped: Counter[str]) -> Iterator[Record | Reject]:
    """Rows of a JSONL file; `skipped` counts the blank lines."""
    number = 0
    try:
        for number, line in lines(blocks):
            if isinstance(line, int):
                yield too_long(f"{name}:{number}", line)
                continue
            content = (line.removeprefix(BOM) if number == 1 else line).strip(b" \t\r\n")
            if content:
                yield _parsed(f"{name}:{number}", content)
            else:
                skipped["blank_lines"] += 1
    except FileBroken as broken:
        yield Reject(f"{name}:{number + 1}", broken.reason, broken.detail)


def array_rows(name: str, blocks: Iterator[bytes]) -> Iterator[Record | Reject]:
    """Rows of a JSON array, numbered from 1. A row that is no JSON ends the file: its bounds are then a guess, too."""
    number = 0
    try:
        for element in elements(blocks):
            number += 1
            place = f"{name}:{number}"
            row = too_long(place, element) if isinstance(element, int) else _parsed(place, element)
            if isinstance(row, Reject) and isinstance(element, bytes) and not _is_bounded(element):
                yield Reject(place, "broken_array", f"{row.detail}; where the next row begins is not known, so none is read")
                return
            yield row
    except FileBroken as broken:
        yield Reject(f"{name}:{number + 1}", broken.reason, broken.detail)


class _Refused(ValueError):
    """JSON that is not taken."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _parsed(place: str, content: bytes) -> Record | Reject:
    try:
        text = content.decode("utf-8")
        brackets = content.count(b"{") + content.count(b"[")
        if brackets > MAX_BRACKETS or (len(content) > MAX_COMMAS and content.count(b",") > MAX_COMMAS):
            raise _Refused("too_many_values", f"more than {MAX_BRACKETS:,} objects and arrays, or {MAX_COMMAS:,} values")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise _Refused("broken_json", f"more text after the value, at character {end + 1}")
        if brackets > MAX_DEPTH:  # seldom, and only then can it be too deep
            _check_depth(value)
    except UnicodeDecodeError as error:
        return Reject(place, "invalid_utf8", f"byte {error.start + 1} of the row is not UTF-8")
    except _Refused as refused:
        return Reject(place, refused.reason, str(refused))
    except RecursionError:
        return Reject(place, "too_deep", f"nested more than {MAX_DEPTH} levels deep")
    except json.JSONDecodeError as error:
        reason = "control_character" if error.msg.startswith("Invalid control character") else "broken_json"
        return Reject(place, reason, f"{error.msg}, at character {error.pos + 1}")
    if not isinstance(value, dict):
        return Reject(place, "not_an_object", f"holds {_JSON_NAMES[type(value)]}")
    return Record(place, cast("dict[str, Any]", value))


def _is_bounded(element: bytes) -> bool:
    """Whether strings and brackets pair, whatever else is refused in the row."""
    try:
        json.loads(element.decode("utf-8", "replace"), strict=False, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = list[object]()
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                inner += cast("list[object]", item)
        level = inner
    if any(isinstance(item, dict | list) for item in level):
        raise _Refused("too_deep", f"nested more than {MAX_DEPTH} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused("duplicate_key", f"the key {ascii(double)[:60]} stands twice in one object")
    return found


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # more than Python's limit of 4,300 digits
        raise _Refused("number_out_of_range", f"an integer of {len(digits):,} digits") from error


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number) or (number == 0.0 and any(d in "123456789" for d in digits.lower().partition("e")[0])):
        raise _Refused("number_out_of_range", f"{digits[:40]} is beyond what a double holds")
    return number


def _constant(name: str) -> NoReturn:
    raise _Refused("not_a_number", f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
_JSON_NAMES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a truth value", type(None): "null"}
