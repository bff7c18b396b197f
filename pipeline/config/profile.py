"""The schema of `profiles/NAME.yaml`: where and how a rung runs, never what is computed.

Contract: a profile must not change results beyond floating-point noise; the smoke gate measures
that. `global_batch = micro_batch x ranks x accumulation` is worked out by `training/batching.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.params import Positive, Section


class Profile(Section):
    """One rung's machine and the way it is used."""

    launcher: Literal["local"]
    """`local`: torchrun on this machine."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto`: CUDA where a GPU is found, else CPU (gloo)."""
    ranks: Positive | Literal["auto"]
    """Processes. `auto`: the largest number of GPUs found that divides the global batch; 2 on a CPU."""
    threads_per_rank: Positive | Literal["auto"]
    """CPU threads of one rank. `auto`: cores / ranks."""
    micro_batch: Positive
    """Packed sequences per forward pass and rank."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights are partitioned over ranks."""
    activation_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about 1/3 more work."""
    checkpoint_every: Positive
    """Optimizer steps between two checkpoints."""
    environment: Annotated[dict[str, str], Field()]
    """Extra environment of the ranks, for example NCCL settings."""
