"""Several ranks on one sequence: DeepSpeed-Ulysses (arXiv:2309.14509) around the attention of `attention.py`.

Contract: ranks are grouped in runs of `sequence_parallel`; the ranks of a group are given the same micro-batch and compute
each its own part of the tokens. Inside attention all tokens of some heads come together, so bounds and lengths are those of
the whole row. Gradients need no care of their own: each token's loss is counted on one rank, and the engine sums over all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def group_of(rank: int, size: int) -> tuple[int, int]:
    """Number of the rank's group, and its place in it."""
    return rank // size, rank % size


def process_group(size: int) -> Any:
    """This rank's group as a process group; collective, since every rank takes part in making all of them."""
    mine = None
    for first in range(0, dist.get_world_size(), size):
        made = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            mine = made
    return mine


def shared(attention: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """`attention` over the tokens of all ranks of `group`, each rank computing some heads of them."""
    from deepspeed.sequence.layer import DistributedAttention

    def local(query: Any, key: Any, value: Any, *, module: Any, **kwargs: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return attention(module, *heads_first, None, **kwargs)[0]

    layer: Any = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)  # pyright: ignore[reportArgumentType] - any callable

    def over_group(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
        tokens_first = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        return layer(*tokens_first, 0, module=module, **kwargs), None

    return over_group
