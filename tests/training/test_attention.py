"""Packed documents do not see each other, on each attention path that training offers.

Would catch: a mask that lets a document read its neighbour, a packed loss that is not the documents' own, grouped heads mapped to
the wrong keys, a window that is off by one, a path that leaves out in silence what a model asks for, a setting that cannot run
here and is not refused by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import MistralConfig  # noqa: E402 - after the check for torch

from pipeline.config.errors import LaunchError  # noqa: E402
from pipeline.training import attention  # noqa: E402
from pipeline.training.collate import PackedCollator  # noqa: E402
from tests.training.tiny import CAPACITY, Row, llama, model_of, plain_loss, row  # noqa: E402

LENGTHS = (5, 1, 9, 4)

cpu = (
    pytest.param("sdpa", "cpu", marks=pytest.mark.unit, id="sdpa"),
    pytest.param("documents", "cpu", marks=pytest.mark.unit, id="documents"),
)
gpu = [
    pytest.param(
        name,
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not (torch.cuda.is_available() and there), reason="no such kernel here")],
        id=name,
    )
    for name, there in (
        ("varlen", importlib.util.find_spec("torch.nn.attention.varlen") is not None),
        ("flash_attention_2", importlib.util.find_spec("flash_attn") is not None),
    )
]
paths = pytest.mark.parametrize(("name", "device"), [*cpu, *gpu])


@pytest.fixture
def build() -> Callable[..., Any]:
    """Makes the tiny Llama with a path of attention; on a GPU in bf16, which its kernels need."""

    def make(name: str, device: str, config: Any = None) -> Any:
        attention.register(None)
        model = model_of(config or llama(), name).eval()
        return model.to("cuda", torch.bfloat16) if device == "cuda" else model

    return make


def packed(seeds: list[int]) -> list[Row]:
    """Two sequences of two documents, each drawn from its seed."""
    one = [
        row(np.random.default_rng(seed), [n], [n - 1], index) for index, (seed, n) in enumerate(zip(seeds, LENGTHS, strict=True))
    ]
    return [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in (one[:2], one[2:])]


def batch_of(rows: list[Row], device: str) -> dict[str, Any]:
    batch = PackedCollator(longest=CAPACITY, fixed_tokens=None)(rows)
    named = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q", "max_length_q")}
    if device == "cuda":  # the package flash-attn is told of keys too
        named |= {"cu_seq_lens_k": batch["cu_seq_lens_q"], "max_length_k": batch["max_length_q"]}
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in named.items()}


def logits(model: Any, rows: list[Row], device: str) -> Any:
    with torch.no_grad():
        return model(**batch_of(rows, device), use_cache=False).logits[0].float().cpu()


@paths
def test_changing_one_document_never_moves_anothers_logits(name: str, device: str, build: Callable[..., Any]) -> None:
    model, seeds = build(name, device), [0, 1, 2, 3]
    before = logits(model, packed(seeds), device)
    starts = np.cumsum([0, *LENGTHS[:-1]])
    for changed in range(len(LENGTHS)):
        other = [100 if index == changed else seed for index, seed in enumerate(seeds)]
        gap = (logits(model, packed(other), device) - before).abs().amax(dim=1)
        for index, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
            moved = float(gap[start : start + length].max())
            assert (moved > 1e-3) if index == changed else (moved == 0.0), (changed, index, moved)


@paths
def test_packed_loss_is_the_loss_of_the_documents_by_themselves(name: str, device: str, build: Callable[..., Any]) -> None:
    rows = packed([10, 11, 12, 13])
    targets = PackedCollator(longest=CAPACITY, fixed_tokens=None)(rows)["targets"]
    found = torch.nn.functional.cross_entropy(logits(build(name, device), rows, device), targets, reduction="sum")
    alone, count = plain_loss(model_of(llama(), "eager").eval(), rows)
    assert count == sum(n - 1 for n in LENGTHS)
    assert float(found) == pytest.approx(float(alone.detach()), rel=1e-5 if device == "cpu" else 2e-2)


@paths
def test_filling_moves_no_documents_logits(name: str, device: str, build: Callable[..., Any]) -> None:
    model, rows = build(name, device), packed([0, 1, 2, 3])
    total = sum(LENGTHS)
    filled = batch_of([*rows, row(np.random.default_rng(9), [11], [0], 4)], device)
    with torch.no_grad():
        found = model(**filled, use_cache=False).logits[0, :total].float().cpu()
    assert float((found - logits(model, rows, device)).abs().max()) < (1e-5 if device == "cpu" else 0.1)


@pytest.mark.parametrize(("name", "device"), [pytest.param("sdpa", "cpu", marks=pytest.mark.unit, id="sdpa"), gpu[0]])
def test_a_sliding_window_reaches_as_far_as_the_models_own(name: str, device: str, build: Callable[..., Any]) -> None:
    """Windows of 3 tokens; held against eager attention, document by document."""
    sizes: dict[str, Any] = {key: getattr(llama(), key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=128, sliding_window=3, initializer_range=0.2
    )
    model, rows = build(name, device, config), packed([0, 1, 2, 3])
    plain = model_of(config, "eager").eval()
    with torch.no_grad():
        alone = [plain(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0] for ids in documents(rows)]
    gap = float((logits(model, rows, device) - torch.cat(alone)).abs().max())
    assert gap < (1e-4 if device == "cpu" else 0.2)


def documents(rows: list[Row]) -> list[Any]:
    return [part for r in rows for part in np.split(r["input_ids"], np.cumsum(r["seq_lengths"])[:-1])]


@pytest.mark.unit
@pytest.mark.parametrize("asked", ["sliding_window", "softcap", "s_aux"])
def test_what_a_path_cannot_do_is_refused_and_not_left_out(asked: str) -> None:
    query, key, value = (torch.zeros(1, heads, 4, 8) for heads in (2, 1, 1))
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(LaunchError, match=f"uses {asked} = 7"):
        attention.document_attention(None, query, key, value, None, cu_seq_lens_q=bounds, **{asked: 7})
    if asked != "sliding_window":  # the varlen kernel has windows
        with pytest.raises(LaunchError, match=f"uses {asked} = 7"):
            attention.varlen_attention(None, query, key, value, None, cu_seq_lens_q=bounds, max_length_q=4, **{asked: 7})


@pytest.mark.unit
def test_a_batch_without_bounds_is_an_error_and_no_single_document() -> None:
    tensors = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(TypeError, match="cu_seq_lens_q"):
        attention.document_attention(None, *tensors, None)  # pyright: ignore[reportCallIssue] - that is the point


@pytest.mark.unit
def test_auto_takes_what_runs_here_and_says_why() -> None:
    assert attention.choose("auto", cuda=False, sequence_parallel=1) == (
        "sdpa",
        "exact document mask, since there is no CUDA device",
    )
    assert attention.choose("auto", cuda=False, sequence_parallel=2)[0] == attention.DOCUMENTS
    assert attention.choose("sdpa", cuda=False, sequence_parallel=1) == ("sdpa", "stated by the profile")
    assert attention.choose("sdpa", cuda=True, sequence_parallel=1)[0] == "sdpa"
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        for ranks in (1, 2):
            assert attention.choose("auto", cuda=True, sequence_parallel=ranks)[0] == attention.VARLEN
            assert attention.choose("varlen", cuda=True, sequence_parallel=ranks)[0] == attention.VARLEN


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stated", "cuda", "ranks", "said"),
    [
        ("varlen", False, 1, ["attention: varlen", "no CPU kernel", "use attention: auto"]),
        ("flash_attention_2", False, 1, ["attention: flash_attention_2", "no CPU kernel", "use attention: auto"]),
        ("sdpa", False, 2, ["attention: sdpa with sequence_parallel: 2", "use attention: auto"]),
        ("sdpa", True, 2, ["attention: sdpa with sequence_parallel: 2", "use attention: auto"]),
    ],
)
def test_what_cannot_run_is_refused_by_name(stated: str, cuda: bool, ranks: int, said: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        attention.choose(stated, cuda=cuda, sequence_parallel=ranks)
    assert [part for part in said if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.unit
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="it is installed")
def test_a_package_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(LaunchError, match="package flash-attn is not installed; use attention: auto"):
        attention.choose("flash_attention_2", cuda=True, sequence_parallel=1)
