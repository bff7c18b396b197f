"""The tokenizer engine: only one whose ids are those of `tokenizers`.

Would catch: a fast engine that is used although one id differs, anywhere in the sample or beside a special token; a
refusal or a missing package that ends the job; a reason that does not say what happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.dataset.engine import choose_engine
from pipeline.dataset.masking import PartTokenizer, load_tokenizer
from tests.workspace import rows

pytestmark = pytest.mark.unit

ROWS = [(f"<|user|>{r['instruction']} {r['input']}<|end|><|assistant|>", r["output"] + "<|end|>") for r in rows(200)]


@pytest.fixture(scope="module")
def tokenizer(base_model: Path) -> PartTokenizer:
    return load_tokenizer(base_model)


def _module(wrong: Callable[[str, list[int]], list[int]]) -> Any:
    """An engine that takes its ids from `tokenizers` and changes some."""

    class Fake:
        def __init__(self, stored: str) -> None:
            self.own = Tokenizer.from_str(stored)

        def encode_batch_flat(self, texts: Sequence[str]) -> tuple[bytes, bytes]:
            ids = [wrong(text, self.own.encode(text, add_special_tokens=False).ids) for text in texts]
            offsets = np.cumsum([0, *map(len, ids)]).astype(np.uint64)
            return np.array([i for found in ids for i in found], np.uint32).tobytes(), offsets.tobytes()

    return SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=Fake))


def test_equal_ids_let_the_engine_in(tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", _module(lambda text, ids: ids))
    engine = choose_engine(tokenizer, ROWS)
    assert engine.name == "fastokens"
    assert "its ids are those of tokenizers on " in engine.reason
    ids, offsets = engine.encode([part for parts in ROWS for part in parts])
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    for text, a, b in zip([p for parts in ROWS for p in parts], offsets[:-1], offsets[1:], strict=True):
        assert ids[a:b].tolist() == tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def _swapped(text: str, ids: list[int]) -> list[int]:
    return ids[::-1] if text == ROWS[-1][1] else ids


def _eaten(text: str, ids: list[int]) -> list[int]:
    return ids[1:] if text.startswith("<|end|>") else ids


def _longer(text: str, ids: list[int]) -> list[int]:
    """Same ids in all, other borders."""
    return [*ids, 5] if text == ROWS[0][0] else ids[1:] if text == ROWS[0][1] else ids


@pytest.mark.parametrize("wrong", [_swapped, _eaten, _longer])
def test_one_other_id_keeps_it_out(wrong: Any, tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", _module(wrong))
    engine = choose_engine(tokenizer, ROWS)
    assert engine.name == "tokenizers"
    assert engine.reason.startswith("fastokens gives other ids, for one of '")
    ids, _ = engine.encode([ROWS[0][0]])
    assert ids.tolist() == tokenizer.tokenizer.encode(ROWS[0][0], add_special_tokens=False).ids


class Panic(BaseException):
    """How a Rust library ends: no Exception."""


@pytest.mark.parametrize("error", [ValueError("no such model"), Panic("index out of bounds\nsecond line")])
def test_a_refusal_is_told(error: BaseException, tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=refuse)))
    engine = choose_engine(tokenizer, ROWS)
    first_line = str(error).splitlines()[0]
    assert (engine.name, engine.reason) == (
        "tokenizers",
        f"fastokens refuses this tokenizer ({type(error).__name__}: {first_line})",
    )


def test_without_the_package(tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    engine = choose_engine(tokenizer, ROWS)
    assert engine.name == "tokenizers"
    assert "fastokens is not installed" in engine.reason
    assert "sft-ladder[fast]" in engine.reason


def test_nothing_to_try_it_on(tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty split still has added tokens to try."""
    monkeypatch.setitem(sys.modules, "fastokens", _module(_eaten))
    assert choose_engine(tokenizer, []).name == "tokenizers"


def test_the_real_engine(tokenizer: PartTokenizer) -> None:
    pytest.importorskip("fastokens")
    engine = choose_engine(tokenizer, ROWS)
    assert engine.name == "fastokens", engine.reason
    awkward = ["", " ", "\n\n", "<|end|>", " <|end|> ", "<|end|><|end|>", "a\u0301\u200d🙂", "\x00\x7f", "x" * 5000, "字" * 3000]
    ids, offsets = engine.encode(awkward)
    due = [tokenizer.tokenizer.encode(text, add_special_tokens=False).ids for text in awkward]
    assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == due


def test_an_interrupt_is_no_refusal(tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=interrupt)))
    with pytest.raises(KeyboardInterrupt):
        choose_engine(tokenizer, ROWS)
