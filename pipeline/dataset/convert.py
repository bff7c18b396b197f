"""Records to examples: what was asked and what is to be answered.

Contract: alpaca rows (`instruction`, `input` or `context`, `output`), text unchanged. A row that asks or answers nothing, holds
something else than text, or carries turns this form has no place for (`system`, `history`) is a Reject.
Other keys are ignored; `ignored_fields` names them so that they are counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.dataset.read import Record, Reject

_USED = ("instruction", "input", "context", "output")
_REFUSED = ("system", "history")


@dataclass(frozen=True)
class Example:
    """One question and its answer; `input` is empty where the row has none."""

    place: str
    instruction: str
    input: str
    output: str


def to_example(record: Record, special_tokens: Collection[str]) -> Example | Reject:
    """Convert an alpaca row; text that spells one of `special_tokens` is rejected, since the tokenizer would obey it."""
    row, place = record.value, record.place
    for field in ("instruction", "output"):
        if row.get(field) is None:
            return Reject(place, "missing_field", f"'{field}' is missing")
    for field in _USED:
        if row.get(field) is not None and not isinstance(row[field], str):
            return Reject(place, "not_text", f"'{field}' is {type(row[field]).__name__}, not text")
    for field in _REFUSED:
        if row.get(field):
            return Reject(place, "unsupported_field", f"'{field}' has content, which an alpaca row has no place for")
    if row.get("input") and row.get("context"):
        return Reject(
            place, "unsupported_field", "'input' and 'context' both have content; which of the two is meant is not clear"
        )
    example = Example(place, row["instruction"], row.get("input") or row.get("context") or "", row["output"])
    if not example.output.strip():
        return Reject(place, "empty_answer", "'output' is empty")
    if not (example.instruction.strip() or example.input.strip()):
        return Reject(place, "empty_question", "'instruction' and 'input' are empty")
    text = "\n".join((example.instruction, example.input, example.output))
    for token in special_tokens:
        if token in text:
            return Reject(place, "special_token", f"the text spells the special token {token!r}")
    if not _encodable(text):
        return Reject(place, "invalid_text", "the text holds half of a surrogate pair")
    return example


def ignored_fields(record: Record) -> list[str]:
    """Keys of a row that conversion does not look at, half a surrogate pair in one as `?`."""
    return [key.encode("utf-8", "replace").decode() for key in record.value if key not in _USED and key not in _REFUSED]


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
