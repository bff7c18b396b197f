"""How a decoder block is computed: transformers' own modules, Liger's kernels, or compiled; and how much of it is kept.

Contract: the functions change a loaded model before the engine is built around it, and change no result beyond rounding.
A decoder block is an element of the longest ModuleList of the model.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pipeline.config.errors import LaunchError


def blocks(model: Any) -> Any:
    """The decoder blocks, as a ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


def check_kernels(kernels: str, *, cuda: bool) -> None:
    """LaunchError for kernels that cannot be had here."""
    if kernels == "liger" and not cuda:
        raise LaunchError("kernels: liger: they are written in Triton, which needs a GPU; use kernels: plain")
    if kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise LaunchError("kernels: liger: the package liger-kernel is not installed; `pip install sft-ladder[liger]`")


def use_kernels(model: Any, kernels: str, *, zero: int, cuda: bool) -> None:
    """Give the blocks the stated kernels; LaunchError where they cannot be had."""
    check_kernels(kernels, cuda=cuda)
    if kernels == "liger":
        liger: Any = importlib.import_module("liger_kernel.transformers")
        # The loss is ours (`head.py`).
        liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    elif kernels == "compiled":
        if zero == 3:
            from deepspeed.utils import set_z3_leaf_modules

            # ZeRO-3 gathers weights in hooks, which the compiler cannot see through: once around a block, not inside.
            set_z3_leaf_modules(model, sorted({type(block) for block in blocks(model)}, key=lambda c: c.__name__))
        for block in blocks(model):
            # All blocks share one code object, so one compilation serves them all. Shapes are fixed by the collator.
            block.forward = torch.compile(block.forward, dynamic=False)


def checkpoint_activations(model: Any, share: float) -> None:
    """Let `share` of the blocks, spread evenly, compute their activations again in the backward pass. Call after
    `use_kernels`: the compiled block is what is run again.

    torch's own checkpoint and not the model's switch, which turns all blocks on or none, and lies inside `forward` in some
    versions of transformers and around it in others.
    """
    for index, block in enumerate(blocks(model)):
        if int((index + 1) * share) > int(index * share):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def tile_mlp(model: Any, pieces: int) -> None:
    """Compute each block's MLP in pieces along the sequence, each checkpointed (DeepSpeed's TiledMLP)."""
    if pieces == 1:
        return
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for block in blocks(model):
        mlp = block.mlp
        plain = type(mlp).forward
        weights = [p for p in mlp.parameters() if p.requires_grad]

        def tiled(hidden: torch.Tensor, *, mlp: Any = mlp, plain: Any = plain, weights: Any = weights) -> torch.Tensor:
            return TiledMLP.apply(functools.partial(_call, plain), mlp, hidden, pieces, weights)

        mlp.forward = tiled


def _call(plain: Any, mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    return plain(mlp, hidden)
