"""Which rows are the same, and which are held out: both by content, so that neither depends on order or machine.

Contract: two rows with the same turns and tools are one row, whatever form they came in. A row is held out when its salted
hash, read as a number in [0, 1), is below the share; the hash is of the opening question alone, so that one question
never stands on both sides, with another answer or another continuation.
"""

from __future__ import annotations

import hashlib

from pipeline.artifact import canonical
from pipeline.dataset.conversation import Conversation


def row_key(conversation: Conversation) -> str:
    """Identity of a row: SHA-256 of what is said."""
    said: list[str] = []
    for turn in conversation.turns:
        text = turn.text if turn.input else turn.content
        said.append(f"{turn.role}:{len(text)}:{text}")  # with its length, so that no text can pass for two
        if turn.calls:
            said.append(f"calls:{canonical([[call.name, call.arguments] for call in turn.calls])}")
    if conversation.tools:
        said.append(f"tools:{canonical(conversation.tools)}")
    return hashlib.sha256("".join(said).encode("utf-8")).hexdigest()


def is_held_out(conversation: Conversation, share: float, seed: int) -> bool:
    """Whether the row belongs to the validation set."""
    opening = next(turn.text for turn in conversation.turns if turn.role == "user")
    question = f"{seed}\n{opening}"
    return int.from_bytes(hashlib.sha256(question.encode("utf-8")).digest()[:8], "big") < share * 2**64
