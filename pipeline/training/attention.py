"""Which attention a run uses: the one place that decides.

Packed documents must not see each other. transformers' SDPA path derives an exact block mask from restarting position
ids when it gets neither a 2-D mask nor a cache; the trainer gives it neither, and the smoke gate compares with
documents run one by one.
"""

from __future__ import annotations


def implementation() -> str:
    """Name of the attention implementation, as `from_pretrained(attn_implementation=...)` takes it."""
    return "sdpa"
