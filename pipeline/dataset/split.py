"""Which rows are the same, and which are held out: both by content, so that neither depends on order or machine.

Contract: two rows with the same question and answer are one row. A row is held out when its salted hash,
read as a number in [0, 1), is below the share; the hash is of the question alone, so that one question never
stands on both sides with two answers.
"""

from __future__ import annotations

import hashlib

from pipeline.artifact import canonical, digest_text
from pipeline.dataset.convert import Example


def row_key(example: Example) -> str:
    """Identity of a row: SHA-256 of question and answer."""
    return digest_text(canonical([example.instruction, example.input, example.output]))


def is_held_out(example: Example, share: float, seed: int) -> bool:
    """Whether the row belongs to the validation set."""
    question = canonical([seed, example.instruction, example.input])
    return int.from_bytes(hashlib.sha256(question.encode("utf-8")).digest()[:8], "big") < share * 2**64
