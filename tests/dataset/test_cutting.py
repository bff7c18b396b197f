"""Where a conversation may be cut: each fragment is what the template writes for the conversation that begins there.

Would catch: a fragment without its system turn or tools, one that begins with a tool's result or with the end of another turn, a
start token or preamble that is missing, a cut where the template writes later conversations in another way.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.fragments import NOWHERE, fragment
from tests.dataset.test_spans import CALLING, OWN, TEMPLATES, TOOL, TOOLS, _template, _text
from tests.dataset.test_templates import CHATML, CHATML_SYSTEM

pytestmark = pytest.mark.unit

LLAMA = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Puts the system turn into the first question, and a start token before each."""

ALL = {**TEMPLATES, "system": ("chat", CHATML_SYSTEM, "<|im_end|>", False), "llama": ("chat", LLAMA, "</s>", False)}
NO_SYSTEM = ("spaced", "alpaca_en", "alpaca_zh")


def _conversation(rng: random.Random, *, system: bool) -> Conversation:
    turns = [Turn("system", _text(rng))] * system
    for number in range(rng.randint(2, 5)):
        trained = number == 1 or rng.random() < 0.7
        turns += [Turn("user", _text(rng)), Turn("assistant", _text(rng), "", trained)]
    return Conversation("f:1", tuple(turns))


@pytest.mark.parametrize("name", ALL)
def test_every_fragment_is_a_conversation_of_its_own(name: str, tmp_path: Path) -> None:
    template = _template(tmp_path, *ALL[name][:2])
    rng = random.Random(name)
    checked = 0
    for number in range(60):
        conversation = _conversation(rng, system=name not in NO_SYSTEM and number % 2 == 0)
        turns = conversation.turns
        (parts,) = template.rows(conversation)
        cuts = template.cuts(conversation, parts)
        answers = [n for n, turn in enumerate(turns) if turn.supervised]
        assert cuts.parts == tuple(range(2, len(parts), 2)), conversation
        for first in cuts.parts:
            end = rng.randrange(first + 2, len(parts) + 2, 2)
            begin, last = answers[first // 2 - 1] + 1, answers[end // 2 - 1]
            later = (*turns[: turns[0].role == "system"], *turns[begin : last + 1])
            due = template.rows(Conversation("f:1", later))[0]
            assert tuple(fragment(parts, first, end, cuts.head, cuts.gap)) == due
            checked += 1
        assert fragment(parts, 0, 2, cuts.head, cuts.gap) == list(parts[:2])
    assert checked > 60


def test_tools_are_repeated_and_a_result_stays_with_its_call(tmp_path: Path) -> None:
    template = _template(tmp_path, "chat", TOOLS)
    system = Turn("system", "You look things up.")
    conversation = Conversation("f:1", (system, *CALLING * 3), (TOOL,))
    (parts,) = template.rows(conversation)
    cuts = template.cuts(conversation, parts)
    assert cuts.parts == (4, 8)
    for first, count in ((4, 2), (8, 1)):
        due = template.rows(Conversation("f:1", (system, *CALLING * count), (TOOL,)))[0]
        assert tuple(fragment(parts, first, len(parts), cuts.head, cuts.gap)) == due
        assert "look_up" in due[0]
    other = Conversation("f:2", (*CALLING * 2,), ({**TOOL, "function": {**TOOL["function"], "description": "other"}},))
    (parts,) = template.rows(other)
    cuts = template.cuts(other, parts)
    assert "other" in fragment(parts, 4, 8, cuts.head, cuts.gap)[0]


@pytest.mark.parametrize(
    "question",
    [
        "{% if message.role == 'user' %}{{ loop.index0 }}{% endif %}",  # numbers the questions
        "{% if message.role == 'user' %}{{ 'first' if loop.first else 'then' }}{% endif %}",
        "{% if loop.index0 == 2 %}{{ message.content }}{% endif %}",
    ],
)
def test_a_cut_only_where_a_later_beginning_is_written_alike(question: str, tmp_path: Path) -> None:
    loaded = _template(tmp_path, "chat", CHATML.replace("{{'<|im_start|>'", question + "{{'<|im_start|>'"))
    turns = (Turn("user", "q1"), Turn("assistant", "a1", "", True), Turn("user", "q2"), Turn("assistant", "a2", "", True))
    conversation = Conversation("f:1", (*turns, Turn("user", "q3"), Turn("assistant", "a3", "", True)))
    for _ in range(6):
        (parts,) = loaded.rows(conversation)
        cuts = loaded.cuts(conversation, parts)
        for first in cuts.parts:
            due = loaded.rows(Conversation("f:1", conversation.turns[first:]))[0]
            assert tuple(fragment(parts, first, 6, cuts.head, cuts.gap)) == due
        assert bool(cuts.parts) == ("first" in question and "then" in question)


def test_one_question_is_never_cut(tmp_path: Path) -> None:
    for number, (name, source, policies) in enumerate(
        [("chat", CHATML, {"supervise": "all_text"}), ("chat", CHATML, {"supervise": "last_turn"}), ("own", OWN, {})]
    ):
        template = _template(tmp_path / str(number), name, source, **policies)
        turns = (Turn("user", "q"), Turn("assistant", "a", "", True))
        conversation = Conversation("f:1", turns * (2 if policies else 1))
        (parts,) = template.rows(conversation)
        assert template.cuts(conversation, parts) == NOWHERE
    calls = Conversation(
        "f:1", (*CALLING[:1], Turn("assistant", "", "", True, (Call("", "look_up", {}),)), *CALLING[2:]), (TOOL,)
    )
    template = _template(tmp_path / "calls", "chat", TOOLS)
    (parts,) = template.rows(calls)
    assert len(parts) == 4
    assert template.cuts(calls, parts) == NOWHERE
