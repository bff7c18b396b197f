"""The engine that turns texts to ids: the fastest one that gives the very ids of the `tokenizers` library.

Contract: `choose_engine` compares `fastokens` (extra `fast`) with `tokenizers` on texts of the data at hand and on every
added token inside such text; one differing id, or any refusal, and `tokenizers` is used. The choice changes the speed and
nothing else, so it is no parameter; its reason is returned, to be logged.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pipeline.dataset.masking import Encoder, Offsets, PartTokenizer, hugging_face, quiet

PROBED_TOKENS = 256
"""Added tokens that are tried inside text; a vocabulary may reserve thousands."""


@dataclass(frozen=True)
class Engine:
    """A way to tokenise, and why it is used. inside: for parts inside a document, where they need another (`PrefixSpace`)."""

    name: str
    reason: str
    encode: Encoder
    inside: Encoder | None


def choose_engine(tokenizer: PartTokenizer, rows: Sequence[Sequence[str]]) -> Engine:
    """The engine for a tokenizer, tried on rows of parts of the data.

    Tried are the parts, and each added token between pieces of text, with and without spaces.
    """
    own = tokenizer.tokenizer
    inside = quiet(Tokenizer.from_str(tokenizer.prefix.inside)) if tokenizer.prefix else None
    exact = hugging_face(own), hugging_face(inside) if inside else None
    texts = [part for parts in rows for part in parts]
    texts += _around_tokens(own, texts)
    try:
        module = importlib.import_module("fastokens")
    except ImportError as error:
        return Engine("tokenizers", f"fastokens is not installed ({error}); `pip install sft-ladder[fast]`", *exact)
    try:
        fast = _fastokens(module, own), _fastokens(module, inside) if inside else None
        for quick, slow, rule in zip(fast, exact, ("", " inside a document"), strict=True):
            if quick and slow and (text := _first_difference(quick, slow, texts)) is not None:
                return Engine("tokenizers", f"fastokens gives other ids{rule}, for one of {text[:60]!r}", *exact)
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = (str(error).splitlines() or [""])[0]
        return Engine("tokenizers", f"fastokens refuses this tokenizer ({type(error).__name__}: {reason[:200]})", *exact)
    return Engine("fastokens", f"its ids are those of tokenizers on {len(texts):,} texts of this data", *fast)


def _fastokens(module: Any, tokenizer: Tokenizer) -> Encoder:
    engine = module.Tokenizer.from_json_str(tokenizer.to_str())

    def encode(texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], Offsets]:
        ids, offsets = engine.encode_batch_flat(list(texts))
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.uint64).astype(np.int64)

    return encode


def _first_difference(quick: Encoder, slow: Encoder, texts: Sequence[str]) -> str | None:
    for batch in _batches(texts):
        (ids, offsets), (due, due_offsets) = quick(batch), slow(batch)
        if np.array_equal(ids, due) and np.array_equal(offsets, due_offsets):
            continue
        for index, text in enumerate(batch):
            found, wanted = ids[offsets[index] : offsets[index + 1]], due[due_offsets[index] : due_offsets[index + 1]]
            if not np.array_equal(found, wanted):
                return text
    return None


def _batches(texts: Sequence[str], size: int = 1024) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _around_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Each added token at the beginning, the end and in the middle of text; tokens may swallow the spaces beside them."""
    tokens = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())][:PROBED_TOKENS]
    pieces = itertools.cycle([text[:40] for text in texts[:97] if text] or ["a"])
    made: list[str] = []
    for token in tokens:
        before, after = next(pieces), next(pieces)
        made += [
            f"{before}{token}{after}",
            f"{before} {token} {after}",
            f"{token}{after}{token}\n{token}",
            f"{token}{token} {after}",
        ]
    return made
