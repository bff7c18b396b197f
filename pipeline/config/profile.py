"""The schema of `profiles/NAME.yaml`: where and how a rung runs, never what is computed.

Contract: a profile must not change results beyond floating-point noise; the smoke gate measures
that. `global_batch = micro_batch x ranks x accumulation` is worked out by `training/batching.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.params import Positive, Section


class ZeroPlusPlus(Section):
    """ZeRO++ (arXiv:2306.10209): less traffic between hosts under ZeRO-3."""

    partition: Positive
    """hpZ: ranks among which a second copy of the weights is spread, as a rule those of one host; 1: none."""
    quantised_weights: bool
    """qwZ: weights are gathered in 8 bits."""
    quantised_gradients: bool
    """qgZ: gradients are reduced in 4 bits."""


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
    """Packed sequences per forward pass and rank (with `sequence_parallel`: per group of ranks)."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights are partitioned over ranks."""
    offload_optimizer: Literal["none", "cpu", "nvme"]
    """Where optimizer state and fp32 masters lie (ZeRO-Offload, arXiv:2101.06840); `nvme` needs ZeRO-3."""
    offload_parameters: Literal["none", "cpu", "nvme"]
    """Where weights lie while they are not used (ZeRO-Infinity, arXiv:2104.07857); needs ZeRO-3."""
    nvme_path: str | None
    """Folder on a local disk for what is offloaded to `nvme`; null elsewhere."""
    zero_plus_plus: ZeroPlusPlus | None
    """null: plain ZeRO."""
    communication: Literal["compute", "fp32", "bf16", "fp16"]
    """Format in which gradients are reduced; `compute`: that of the arithmetic."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2"]
    """`auto`: torch's varlen kernel on a GPU that has it, else an exact document mask in SDPA."""
    kernels: Literal["plain", "liger", "compiled"]
    """Layer kernels: transformers' own, Liger's (extra `liger`), or each decoder block through torch.compile."""
    activation_checkpointing: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of decoder blocks whose activations are computed again in the backward pass: 1 takes least memory and 1/3 more
    work, 0 takes most and none."""
    sequence_parallel: Positive
    """Ranks that share one sequence (DeepSpeed-Ulysses, arXiv:2309.14509); 1: none."""
    tiled_mlp: Positive
    """Pieces in which a block's MLP is computed, to save activations of long sequences; 1: whole."""
    on_out_of_memory: Literal["fail", "smaller"]
    """`smaller`: try again with half the micro-batch, then all activations checkpointed; the global batch stays."""
    profile_flops: bool
    """DeepSpeed's flops profiler at step 5, into the run folder."""
    checkpoint_every: Positive
    """Optimizer steps between two checkpoints."""
    environment: Annotated[dict[str, str], Field()]
    """Extra environment of the ranks, for example NCCL settings."""

    @model_validator(mode="after")
    def _fits(self) -> Profile:
        if self.offload_parameters != "none" and self.zero != 3:
            raise ValueError(
                f"offload_parameters is '{self.offload_parameters}' with zero: {self.zero}; only ZeRO-3 moves weights"
            )
        if self.offload_optimizer != "none" and self.zero == 0:
            raise ValueError(f"offload_optimizer is '{self.offload_optimizer}' with zero: 0; use zero: 1 or higher")
        if self.offload_optimizer == "nvme" and self.zero != 3:
            raise ValueError(f"offload_optimizer is 'nvme' with zero: {self.zero}; only ZeRO-3 reaches a disk")
        if ("nvme" in (self.offload_optimizer, self.offload_parameters)) != (self.nvme_path is not None):
            raise ValueError("nvme_path is needed where something is offloaded to 'nvme', and null elsewhere")
        if self.zero_plus_plus is not None and self.zero != 3:
            raise ValueError(f"zero_plus_plus with zero: {self.zero}; it is a form of ZeRO-3")
        return self
