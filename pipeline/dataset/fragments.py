"""Where a conversation may be cut, and what is left as a conversation of its own.

Contract: a fragment is the text that the template gives to a conversation of the same system turn and tools which begins at that
question: what a model sees whose older turns no longer fit. It begins with a question, never with a tool's result. For rows of
one question, and where a template writes a conversation in another way once it begins later, there is no cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cuts:
    """parts: indices of the contexts that begin with a question, the first context left out. head: characters of the first
    context before its question (system turn, tools, and the mark of a question), with which each fragment begins. gap:
    characters of a later context before its question, in the place of which the head stands."""

    parts: tuple[int, ...]
    head: int
    gap: int


NOWHERE = Cuts((), 0, 0)


def fragment(parts: Sequence[str], first: int, end: int, head: int, gap: int) -> list[str]:
    """The parts of a document that holds parts first..end of a row."""
    if first == 0:
        return list(parts[:end])
    return [parts[0][:head] + parts[first][gap:], *parts[first + 1 : end]]
