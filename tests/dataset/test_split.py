"""Duplicates and held-out rows.

Would catch: one question on both sides of the split, a split that changes with the order or the other rows, a seed
without effect, two different rows taken for one.
"""

from __future__ import annotations

import pytest

from pipeline.dataset.convert import Example
from pipeline.dataset.split import is_held_out, row_key

pytestmark = pytest.mark.unit

MANY = [Example(f"f:{i}", f"question {i}", f"第{i}只" if i % 2 else "", f"answer {i}") for i in range(4000)]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.9])
def test_share_is_about_the_one_asked_for(share: float) -> None:
    """Four standard deviations of a binomial; hashes are fixed, so this holds always or never."""
    held = sum(is_held_out(e, share, 7) for e in MANY) / len(MANY)
    assert abs(held - share) < 4 * (share * (1 - share) / len(MANY)) ** 0.5


def test_a_question_stays_on_one_side_whatever_its_answer_and_place() -> None:
    for example in MANY[:500]:
        other = Example("g:1", example.instruction, example.input, "another answer")
        assert is_held_out(example, 0.3, 7) == is_held_out(other, 0.3, 7)


def test_a_larger_share_keeps_what_a_smaller_held_out() -> None:
    small = {e.place for e in MANY if is_held_out(e, 0.1, 7)}
    large = {e.place for e in MANY if is_held_out(e, 0.2, 7)}
    assert small < large


def test_the_seed_chooses_others() -> None:
    first = {e.place for e in MANY if is_held_out(e, 0.1, 7)}
    second = {e.place for e in MANY if is_held_out(e, 0.1, 8)}
    assert len(first & second) < len(first) / 2


def test_fixed_rows_fall_as_ever() -> None:
    """A split that moved between releases would put rows once trained on among the held-out."""
    assert [i for i in range(60) if is_held_out(MANY[i], 0.1, 7)] == [13, 33, 57]
    assert row_key(Example("f:1", "问题", "in", "answer")) == "32a3012eae208b230a7a9a109e8bd25ed5a0526d8c04d5e57795fb2002949d16"


def test_same_row_same_key_whatever_its_place() -> None:
    assert row_key(Example("a:1", "q", "i", "o")) == row_key(Example("b:2", "q", "i", "o"))


def test_any_difference_is_another_row() -> None:
    rows = [
        ("q", "i", "o"),
        ("q", "", "io"),
        ("qi", "", "o"),
        ("q ", "i", "o"),
        ("q", "i", "o\n"),
        ("Q", "i", "o"),
        ("\u00e9", "i", "o"),
        ("e\u0301", "i", "o"),
    ]
    assert len({row_key(Example("f:1", *row)) for row in rows}) == len(rows)
