"""Alpaca rows to examples.

Would catch: text that is trimmed or changed, turns dropped without a word, an answer that the tokenizer would read as a
stop, text that cannot be written as UTF-8, fields that are ignored and not counted.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.dataset.convert import Example, ignored_fields, to_example
from pipeline.dataset.read import Record, Reject

pytestmark = pytest.mark.unit

SPECIAL = ("<|end|>", "</s>")


def _convert(**row: Any) -> Example | Reject:
    return to_example(Record("f:1", row), SPECIAL)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"instruction": "q", "input": "i", "output": "a"}, ("q", "i", "a")),
        ({"instruction": "q", "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "input": None, "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "input": "", "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "context": "c", "output": "a"}, ("q", "c", "a")),
        ({"instruction": "q", "context": "c", "input": "", "output": "a"}, ("q", "c", "a")),
        ({"instruction": "q", "context": None, "input": "i", "output": "a"}, ("q", "i", "a")),
        ({"instruction": "", "input": "i", "output": "a"}, ("", "i", "a")),
        ({"instruction": " q\r\n", "input": "\ti ", "output": "\n 答え。 "}, (" q\r\n", "\ti ", "\n 答え。 ")),
        ({"instruction": "q", "output": "a", "history": [], "system": ""}, ("q", "", "a")),
        ({"instruction": "q", "output": "a", "history": None, "system": None}, ("q", "", "a")),
        ({"instruction": "😀", "output": "\u2028"}, None),
        ({"instruction": "x < y", "output": "<end|> </ s>"}, ("x < y", "", "<end|> </ s>")),
    ],
)
def test_text_is_taken_as_it_is(row: dict[str, Any], wanted: tuple[str, str, str] | None) -> None:
    found = _convert(**row)
    if wanted is None:  # a line separator alone is white space: no answer
        assert isinstance(found, Reject)
        assert found.reason == "empty_answer"
    else:
        assert found == Example("f:1", *wanted)


@pytest.mark.parametrize(
    ("row", "reason", "named"),
    [
        ({"output": "a"}, "missing_field", "instruction"),
        ({"instruction": None, "output": "a"}, "missing_field", "instruction"),
        ({"instruction": "q"}, "missing_field", "output"),
        ({"instruction": "q", "output": None}, "missing_field", "output"),
        ({"instruction": "q", "output": 6}, "not_text", "'output' is int"),
        ({"instruction": ["q"], "output": "a"}, "not_text", "'instruction' is list"),
        ({"instruction": "q", "input": 0, "output": "a"}, "not_text", "'input' is int"),
        ({"instruction": "q", "context": {}, "output": "a"}, "not_text", "'context' is dict"),
        ({"instruction": "q", "output": " \n"}, "empty_answer", "output"),
        ({"instruction": "", "output": "a"}, "empty_question", "instruction"),
        ({"instruction": " ", "input": "\n", "output": "a"}, "empty_question", "input"),
        ({"instruction": "q", "output": "a", "history": [["x", "y"]]}, "unsupported_field", "history"),
        ({"instruction": "q", "output": "a", "system": "be kind"}, "unsupported_field", "system"),
        ({"instruction": "q", "input": "i", "context": "c", "output": "a"}, "unsupported_field", "'input' and 'context'"),
        ({"instruction": "q", "output": "a<|end|>"}, "special_token", "<|end|>"),
        ({"instruction": "why </s>?", "output": "a"}, "special_token", "</s>"),
        ({"instruction": "q", "context": "</s>", "output": "a"}, "special_token", "</s>"),
        ({"instruction": "q", "output": "\ud83d"}, "invalid_text", "surrogate"),
        ({"instruction": "q", "input": "\ude00", "output": "a"}, "invalid_text", "surrogate"),
    ],
)
def test_rejects_say_why(row: dict[str, Any], reason: str, named: str) -> None:
    found = _convert(**row)
    assert isinstance(found, Reject)
    assert (found.place, found.reason) == ("f:1", reason)
    assert named in found.detail


def test_a_special_token_across_two_fields_is_none() -> None:
    """The template writes something between the fields, so the two halves never meet."""
    assert isinstance(_convert(instruction="<|en", input="d|>", output="a"), Example)


def test_ignored_fields_are_named() -> None:
    row = {"instruction": "q", "input": "", "output": "a", "history": [], "id": 7, "类别": "x"}
    assert ignored_fields(Record("f:1", row)) == ["id", "类别"]


def test_ignored_fields_can_be_written() -> None:
    (name,) = ignored_fields(Record("f:1", {"instruction": "q", "output": "a", "\ud83d": 1}))
    assert name.encode("utf-8")
