"""Where a rendered conversation may be cut, told by rendering.

Contract: a cut stands before a question, and what `fragment` makes of the row from there on is what the template writes for
the conversation of the same system turn and tools that begins at that question. To know, each row is rendered once more from
its first cut on; if the two differ, it has no cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.config.errors import DataError
from pipeline.dataset.conversation import Conversation, Turn
from pipeline.dataset.fragments import NOWHERE, Cuts, fragment
from pipeline.dataset.frames import marked
from pipeline.dataset.rendering import Renderer

Parts = tuple[str, ...]


class Cutter:
    """The cuts of one template. parts: those of a conversation, given the turns that are supervised."""

    def __init__(self, renderer: Renderer, stop_token: str, parts: Callable[[Conversation, Sequence[int]], Parts]) -> None:
        self._renderer, self._stop_token, self._parts = renderer, stop_token, parts
        self._between = self._between_turns()
        """What stands between the stop token of an answer and the next question; None where the template takes no second one."""
        self._head: tuple[object, str | None] = (None, None)

    def cuts(self, conversation: Conversation, answers: Sequence[int], parts: Parts) -> Cuts:
        """Where a row may be cut; answers: the turns that its supervised parts are."""
        if self._between is None:
            return NOWHERE
        turns = conversation.turns
        after = [answer + 1 for answer in answers[:-1]]  # the turn each later context begins with
        found = tuple(2 * n for n, turn in enumerate(after, start=1) if turns[turn].role == "user")
        head = self._before_question(conversation) if found else None
        if head is None or not parts[0].startswith(head) or not all(parts[n].startswith(self._between) for n in found):
            return NOWHERE
        cuts = Cuts(found, len(head), len(self._between))
        return cuts if self._begins_anew(conversation, answers, parts, cuts) else NOWHERE

    def _between_turns(self) -> str | None:
        turns = [Turn("user" if n % 2 == 0 else "assistant", marked(n)) for n in range(4)]
        try:
            text = self._renderer.text(Conversation("probe", tuple(turns)), 4)
        except DataError:
            return None
        _, stop, between = text.partition(marked(1))[2].partition(marked(2))[0].partition(self._stop_token)
        return between if stop and marked(2) in text else None

    def _before_question(self, conversation: Conversation) -> str | None:
        """What stands before the first question of a conversation with this system turn and these tools."""
        said = (conversation.turns[:1] if conversation.turns[0].role == "system" else (), conversation.tools)
        if self._head[0] != said:  # rows that follow each other mostly share it
            opened = Conversation(conversation.place, (*said[0], Turn("user", marked(0))), conversation.tools)
            try:
                before, found, _ = self._renderer.text(opened, len(opened.turns), prompt=True).partition(marked(0))
            except DataError:
                before = found = ""
            self._head = (said, before if found else None)
        return self._head[1]

    def _begins_anew(self, conversation: Conversation, answers: Sequence[int], parts: Parts, cuts: Cuts) -> bool:
        """Whether the template writes the conversation from its first cut on as a fragment is written."""
        first = cuts.parts[0]
        system = conversation.turns[:1] if conversation.turns[0].role == "system" else ()
        start = answers[first // 2 - 1] + 1
        later = Conversation(conversation.place, (*system, *conversation.turns[start:]), conversation.tools)
        kept = [answer - start + len(system) for answer in answers if answer >= start]
        try:
            return self._parts(later, kept) == tuple(fragment(parts, first, len(parts), cuts.head, cuts.gap))
        except DataError:
            return False
