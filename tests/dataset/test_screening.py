"""Special tokens, half characters and reasoning in a conversation.

Would catch: an answer that the tokenizer would read as a stop, an escape that leaves or makes a token, a token hidden in a
call or a tool, text that cannot be written as UTF-8, an answer that is nothing but reasoning.
"""

from __future__ import annotations

import pytest

from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.reading.record import Reject
from pipeline.dataset.screening import BREAK, Screen, Screened

pytestmark = pytest.mark.unit

SPECIAL = ("<|end|>", "</s>", "<|eot|>", "<|eot|><|x|>", "[INST]", "|>|>")


def row(question: str, answer: str, context: str = "") -> Conversation:
    return Conversation("f:1", (Turn("user", question, context), Turn("assistant", answer, "", True)))


def _screened(conversation: Conversation, policy: str = "reject", *, strip: bool = False) -> Screened | Reject:
    return Screen(SPECIAL, policy, strip=strip).check(conversation)  # type: ignore[arg-type]


HIDDEN = {
    "answer": row("q", "a<|end|>"),
    "question": row("why </s>?", "a"),
    "input": row("q", "a", "</s>"),
    "system": Conversation("f:1", (Turn("system", "[INST]"), *row("q", "a").turns)),
    "tool result": Conversation("f:1", (*row("q", "a").turns, Turn("tool", "<|eot|>"))),
    "name": Conversation("f:1", (*row("q", "a").turns, Turn("tool", "r", name="</s>"))),
    "call id": Conversation("f:1", (*row("q", "a").turns, Turn("tool", "r", call_id="</s>"))),
    "called": Conversation("f:1", (Turn("user", "q"), Turn("assistant", "", "", True, (Call("", "</s>", {}),)))),
    "argument": Conversation(
        "f:1", (Turn("user", "q"), Turn("assistant", "", "", True, (Call("", "f", {"a": [{"b": "</s>"}]}),)))
    ),
    "argument's key": Conversation("f:1", (Turn("user", "q"), Turn("assistant", "", "", True, (Call("", "f", {"</s>": 1}),)))),
    "tool": Conversation("f:1", row("q", "a").turns, ({"function": {"name": "f", "description": "</s>"}},)),
}


@pytest.mark.parametrize("conversation", HIDDEN.values(), ids=HIDDEN)
def test_a_special_token_is_rejected_or_escaped_wherever_it_stands(conversation: Conversation) -> None:
    found = _screened(conversation)
    assert isinstance(found, Reject)
    assert found.reason == "special_token"
    escaped = _screened(conversation, "escape")
    assert isinstance(escaped, Screened)
    assert escaped.escaped
    texts = list(escaped.conversation.texts())
    assert not any(token in text for token in SPECIAL for text in texts)
    assert [text.replace(BREAK, "") for text in texts] == list(conversation.texts())
    assert isinstance(_screened(escaped.conversation), Screened)


@pytest.mark.parametrize(
    "text", ["<|eot|><|x|>", "<|end|>|>|>", "<|eot|><|eot|><|x|>", "</s></s>", "[INST][INST]", "<|end|></s>"]
)
def test_neighbours_are_broken_too(text: str) -> None:
    escaped = _screened(row("q", text), "escape")
    assert isinstance(escaped, Screened)
    (_, answer) = escaped.conversation.turns
    assert not any(token in answer.content for token in SPECIAL)
    assert answer.content.replace(BREAK, "") == text


@pytest.mark.parametrize("text", ["<end|> </ s>", "< |end|>", "<|END|>", "x < y", "[inst]", "|>"])
def test_what_only_looks_like_one_is_text(text: str) -> None:
    for policy in ("reject", "escape"):
        found = _screened(row("q", text), policy)
        assert isinstance(found, Screened)
        assert (found.conversation, found.escaped) == (row("q", text), False)


def test_a_token_across_two_texts_is_none() -> None:
    """The template writes something between them, so the two halves never meet."""
    assert isinstance(_screened(row("<|en", "a", "d|>")), Screened)


def test_no_special_tokens_at_all() -> None:
    assert isinstance(Screen((), "reject", strip=False).check(row("<|end|>", "a")), Screened)


@pytest.mark.parametrize("policy", ["reject", "escape"])
def test_half_a_character(policy: str) -> None:
    for half in ("\ud83d", "\ude00"):
        for conversation in (row("q", half), row("q", "a", half), row(half, "a")):
            found = _screened(conversation, policy)
            assert isinstance(found, Reject)
            assert found.reason == "invalid_text"


def test_reasoning_is_stripped_from_answers_only() -> None:
    found = _screened(row("<think>q</think>", "<think>\nh\n</think>\n\na <think>b</think>c"), strip=True)
    assert isinstance(found, Screened)
    assert [turn.content for turn in found.conversation.turns] == ["<think>q</think>", "a c"]
    assert found.stripped
    assert found.conversation.turns[1].supervised
    same = _screened(row("q", "a"), strip=True)
    assert isinstance(same, Screened)
    assert not same.stripped
    bare = _screened(row("q", "<think>h</think>\n"), strip=True)
    assert isinstance(bare, Reject)
    assert bare.reason == "empty_answer"
