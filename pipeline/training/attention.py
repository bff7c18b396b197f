"""Which attention a run uses: the one place that decides, registers and says so.

Contract: packed documents never see each other, on every path. A batch carries what each path needs (`collate.py`).

    sdpa       transformers' own; position ids that restart make it an exact block mask, when there is neither a 2-D mask
               nor a cache
    varlen     torch's variable-length flash kernel (torch 2.11 and later, CUDA only); no extra package. It takes grouped
               key-value heads as they are: repeating them first gave the same bits and cost their memory
    documents  SDPA one document after the other, on any device; used where ranks share sequences on a CPU
    flash_attention_2   the package flash-attn, if it is installed and the profile asks for it
"""

from __future__ import annotations

import importlib.util
import inspect
from itertools import pairwise
from typing import Any

import torch

from pipeline.config.errors import LaunchError
from pipeline.training.sequence import shared

VARLEN, DOCUMENTS = "varlen", "documents"
"""Registered names. transformers prepares masks by name: one with `flash` in it would be taken for its own."""


def choose(stated: str, *, cuda: bool, sequence_parallel: int) -> tuple[str, str]:
    """Name of the implementation, as `from_pretrained(attn_implementation=...)` takes it, and why. LaunchError where the
    stated one cannot run here."""
    reason = _lacks(stated, cuda)
    if stated == "auto" and reason:
        name, why = "sdpa", f"exact document mask, since {reason}"
        return (name, why) if sequence_parallel == 1 else (DOCUMENTS, "one document after the other, on shared sequences")
    if reason:
        raise LaunchError(f"attention: {stated}: {reason}; use attention: auto")
    if sequence_parallel > 1 and stated not in ("auto", VARLEN):
        raise LaunchError(f"attention: {stated} with sequence_parallel: {sequence_parallel}; use attention: auto")
    return (VARLEN, "torch's variable-length kernel") if stated == "auto" else (stated, "stated by the profile")


def register(group: Any) -> None:
    """Make our own known to transformers, with no mask of theirs. group: process group of the ranks that share a sequence,
    None where none do."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, attention in ((VARLEN, varlen_attention), (DOCUMENTS, document_attention)):
        AttentionInterface.register(name, attention if group is None else shared(attention, group))
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """As `varlen_attention`, with one call of SDPA for each document."""
    _refuse(unknown, "sliding_window", "softcap", "s_aux")
    bounds = cu_seq_lens_q.tolist()
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    outputs = [
        sdpa(*(x[:, :, start:end] for x in (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True)
        for start, end in pairwise(bounds)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document. query: (1, heads, T, d); key, value: (1, key_value_heads, T, d); cu_seq_lens_q:
    (documents + 1,) int32 bounds that end at T. Returns (1, T, heads, d)."""
    from torch.nn.attention.varlen import varlen_attn

    _refuse(unknown, "softcap", "s_aux")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # Queries and keys have the same bounds and are given the same tensor: two equal ones would cost a comparison.
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    call: Any = varlen_attn
    return call(q, k, v, *bounds, scale=scaling, window_size=window, **_grouped())[None], None


def _refuse(given: dict[str, Any], *names: str) -> None:
    """LaunchError where a model asks for a form of attention that would otherwise be left out in silence."""
    for name in names:
        if given.get(name) is not None:
            raise LaunchError(
                f"attention: this model's uses {name} = {given[name]}, which this kernel has not; use attention: sdpa"
            )


def _grouped() -> dict[str, bool]:
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # always on in 2.11


def _lacks(stated: str, cuda: bool) -> str | None:
    """What `stated` (auto: varlen) is in want of here, or None."""
    if stated == "sdpa":
        return None
    if not cuda:
        return "there is no CUDA device" if stated == "auto" else "it has no CPU kernel"
    if stated == "flash_attention_2":
        return None if importlib.util.find_spec("flash_attn") else "the package flash-attn is not installed"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen kernel (2.11 has)"
    return None
