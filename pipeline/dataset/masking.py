"""Text parts to token ids and labels.

Contract: each part is tokenised by itself, so a token belongs to the prompt or to the answer, never to both, and the
prompt's ids are those the model gets when it answers. Labels are the ids of supervised parts and IGNORED elsewhere. One
start token precedes the document if the tokenizer adds one and the text does not begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.config.errors import ModelError

IGNORED = -100
"""Label of a token that is not trained on (torch's `ignore_index`)."""


@dataclass(frozen=True)
class PartTokenizer:
    """A tokenizer with the start token it adds by itself (empty tuple: none)."""

    tokenizer: Tokenizer
    start: tuple[int, ...]

    def id_of(self, token: str) -> int:
        """Id of a special token; ModelError if the tokenizer has none such."""
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ModelError(
                f"stop token {token!r} is not in the tokenizer's vocabulary; use the tokenizer the template was made for"
            )
        return found


@dataclass(frozen=True)
class Document:
    """Ids and labels of one row, of equal length."""

    input_ids: list[int]
    labels: list[int]

    @property
    def supervised(self) -> int:
        """Tokens that are trained on. The first token is never predicted, whatever its label."""
        return sum(label != IGNORED for label in self.labels[1:])


def load_tokenizer(model: Path) -> PartTokenizer:
    """The tokenizer of a base model; neither torch nor transformers is needed for it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with_special = tokenizer.encode("a").ids
    without = tokenizer.encode("a", add_special_tokens=False).ids
    # An end token that the tokenizer would add is left out: the template has its own.
    before = next((i for i in range(len(with_special)) if with_special[i : i + len(without)] == without), 0)
    return PartTokenizer(tokenizer, tuple(with_special[:before]))


def tokenise(rows: Sequence[Sequence[str]], tokenizer: PartTokenizer) -> list[Document]:
    """Documents of many rows of parts (context, supervised, context, ...), in order."""
    flat = [part for parts in rows for part in parts]
    encoded = iter(tokenizer.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    return [_joined([next(encoded).ids for _ in parts], tokenizer.start) for parts in rows]


def _joined(parts: list[list[int]], start: tuple[int, ...]) -> Document:
    first = parts[0] if tuple(parts[0][: len(start)]) == start else [*start, *parts[0]]
    ids = list(first)
    labels = [IGNORED] * len(first)
    for index, part in enumerate(parts[1:], start=1):
        ids += part
        labels += part if index % 2 else [IGNORED] * len(part)
    return Document(ids, labels)


def truncated(document: Document, length: int) -> Document:
    """The first `length` tokens; no stop token is invented for the cut end."""
    return Document(document.input_ids[:length], document.labels[:length])
