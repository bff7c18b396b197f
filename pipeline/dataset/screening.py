"""What may not stand in a conversation whatever its form: half characters, special tokens, and reasoning on request.

Contract: `Screen.check` returns the conversation, changed only as the stated policies say, or a Reject.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.dataset.conversation import Conversation, Turn, problem
from pipeline.dataset.reading.record import Reject

BREAK = "\u200b"
"""Put after the first character of an escaped special token: a zero-width space, which no tokenizer skips."""

_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Screened:
    conversation: Conversation
    escaped: bool
    stripped: bool


class Screen:
    """The policies of one run. special_tokens: texts the tokenizer would obey. escape: break them up, else reject.
    strip: take `<think>...</think>` out of answers."""

    def __init__(self, special_tokens: Collection[str], policy: Literal["reject", "escape"], *, strip: bool) -> None:
        tokens = sorted(special_tokens, key=len, reverse=True)
        # Nearly no text holds a first character such as `<`, so one search for it spares one for each of 256 tokens.
        self._first = sorted({token[0] for token in tokens})
        self._pattern = re.compile("|".join(map(re.escape, tokens)) if tokens else r"(?!)")
        self._escape, self._strip = policy == "escape", strip

    def check(self, conversation: Conversation) -> Screened | Reject:
        stripped = False
        if self._strip:
            shorter = tuple(_without_reasoning(turn) for turn in conversation.turns)
            stripped = shorter != conversation.turns
            if stripped:
                breach = problem(shorter)
                if breach:
                    return Reject(conversation.place, breach[0], breach[1] + " without its reasoning")
                conversation = Conversation(conversation.place, shorter, conversation.tools)
        turns = conversation.turns
        if len(turns) == 2 and not (turns[1].calls or conversation.tools):  # nearly every row; a generator would take longer
            text = f"{turns[0].content}\n{turns[0].input}\n{turns[1].content}"
        else:
            text = "\n".join(conversation.texts())
        if not _encodable(text):
            return Reject(conversation.place, "invalid_text", "the text holds half of a surrogate pair")
        found = self._found(text)
        if found is None:
            return Screened(conversation, False, stripped)
        if not self._escape:
            return Reject(conversation.place, "special_token", f"the text spells the special token {found!r}")
        return Screened(conversation.mapped(self._broken), True, stripped)

    def _found(self, text: str) -> str | None:
        for first in self._first:
            if first in text:
                match = self._pattern.search(text)
                return match[0] if match else None
        return None

    def _broken(self, text: str) -> str:
        while self._pattern.search(text):  # what two tokens share may spell a third once one is broken
            text = self._pattern.sub(lambda m: m[0][0] + BREAK + m[0][1:], text)
        return text


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _without_reasoning(turn: Turn) -> Turn:
    if turn.role != "assistant" or "<think>" not in turn.content:
        return turn
    return replace(turn, content=_REASONING.sub("", turn.content))
