"""Duplicates and held-out rows.

Would catch: one question on both sides of the split, a split that changes with the order or the other rows, a seed
without effect, two different rows taken for one, one row in two forms taken for two.
"""

from __future__ import annotations

import pytest

from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.split import is_held_out, row_key

pytestmark = pytest.mark.unit


def row(place: str, instruction: str, context: str, output: str) -> Conversation:
    return Conversation(place, (Turn("user", instruction, context), Turn("assistant", output, "", True)))


MANY = [row(f"f:{i}", f"question {i}", f"第{i}只" if i % 2 else "", f"answer {i}") for i in range(4000)]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.9])
def test_share_is_about_the_one_asked_for(share: float) -> None:
    """Four standard deviations of a binomial; hashes are fixed, so this holds always or never."""
    held = sum(is_held_out(e, share, 7) for e in MANY) / len(MANY)
    assert abs(held - share) < 4 * (share * (1 - share) / len(MANY)) ** 0.5


def test_a_question_stays_on_one_side_whatever_follows_it() -> None:
    for one in MANY[:500]:
        question = one.turns[0]
        others = [
            Conversation("g:1", (question, Turn("assistant", "another answer", "", True))),
            Conversation("g:1", (Turn("system", "s"), *one.turns, Turn("user", "and?"), Turn("assistant", "more", "", True))),
            Conversation("g:1", (Turn("user", question.text), one.turns[1])),
        ]
        assert {is_held_out(other, 0.3, 7) for other in others} == {is_held_out(one, 0.3, 7)}


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
    assert [i for i in range(60) if is_held_out(MANY[i], 0.1, 7)] == [7, 43, 48, 51]
    assert row_key(row("f:1", "问题", "in", "answer")) == "1c5da05f5bac5c67bb0d58823dc8d6dc5c20406c21f8cd0f50f01075a614ccee"


def test_same_row_same_key_whatever_its_place_and_form() -> None:
    assert row_key(row("a:1", "q", "i", "o")) == row_key(row("b:2", "q\ni", "", "o"))


def test_any_difference_is_another_row() -> None:
    rows = [
        row("f:1", *texts)
        for texts in [
            ("q", "i", "o"),
            ("q", "", "io"),
            ("qi", "", "o"),
            ("q ", "i", "o"),
            ("q", "i", "o\n"),
            ("Q", "i", "o"),
            ("\u00e9", "i", "o"),
            ("e\u0301", "i", "o"),
            ("q", "", "oassistant:1:o"),
        ]
    ]
    question, answer = rows[0].turns
    rows += [
        Conversation("f:1", (Turn("system", "s"), question, answer)),
        Conversation("f:1", (question, answer), ({"type": "function", "function": {"name": "f"}},)),
        Conversation("f:1", (question, Turn("assistant", "o", "", True, (Call("", "f", {}),)))),
        Conversation("f:1", (question, Turn("assistant", "o", "", True, (Call("", "f", {"a": 1}),)))),
        Conversation("f:1", (question, answer, question, answer)),
    ]
    assert len({row_key(one) for one in rows}) == len(rows)
