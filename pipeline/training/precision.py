"""The number formats of a run, rendered from one section for loader, trainer, engine and launcher alike; what the device, the
ZeRO stage or the installed DeepSpeed cannot give is refused before launch. Imports no torch.

Contract: master weights and optimizer state are fp32, unless `masters: bf16` asks otherwise, and then `announcement` says so.
Lines of DeepSpeed are those of 0.19.8.
"""

from __future__ import annotations

import subprocess
from typing import Any, Literal

from pipeline.config.errors import LaunchError
from pipeline.config.params import Precision
from pipeline.config.profile import Profile

Format = Literal["fp32", "bf16", "fp16"]

AMPERE = (8, 0)
"""First compute capability with bf16 and TF32 matrix units."""

_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def weights_format(precision: Precision) -> Format:
    """Format of the weights that the engine holds beside the masters. With fp32 embeddings all of them are fp32, and autocast
    turns each linear layer's to 16 bits on its way into the product."""
    if precision.compute in ("fp32", "tf32") or precision.embeddings == "fp32":
        return "fp32"
    return precision.compute  # pyright: ignore[reportReturnType] - bf16 or fp16 is left


def load_dtype(precision: Precision) -> str:
    """Name of the torch dtype the base model is loaded in, for `from_pretrained(dtype=...)`.

    The engine casts weights to their format before it makes the masters (engine.py:2088), so loading them in that format
    gives the same masters and takes half the host memory.
    """
    return _LONG[weights_format(precision)]


def trainer_arguments(precision: Precision) -> dict[str, bool]:
    """The fields of TrainingArguments. TF32 is set either way: a rotary embedding's positions are an fp32 product, and ten bits
    of mantissa do not hold them."""
    held = weights_format(precision)
    return {"bf16": held == "bf16", "fp16": held == "fp16", "tf32": precision.compute == "tf32"}


def launcher_environment(precision: Precision) -> dict[str, str]:
    """What the ranks inherit: accelerate's mixed precision, which it reads before it sees the engine's configuration, and
    torch's TF32 switch, which NVIDIA's containers turn on."""
    held = weights_format(precision)
    return {
        "ACCELERATE_MIXED_PRECISION": "no" if held == "fp32" else held,
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1" if precision.compute == "tf32" else "0",
    }


def engine_config(precision: Precision) -> dict[str, Any]:
    """The blocks of the DeepSpeed configuration.

    fp16: the loss is scaled by 2^16 at first, by half after the second overflow in a row and never by less than 1, doubled after
    1,000 good steps. bf16 has the range of fp32 and is not checked for overflow: the check is a pass over all gradients and a
    wait for the device in each step, and a NaN shows in the logged norm.
    """
    held = weights_format(precision)
    low = precision.masters == "bf16"
    blocks: dict[str, Any] = {
        "bf16": {
            "enabled": held == "bf16",
            "check_grad_overflow": False,
            "bf16_master_weights_and_grads": low,
            "bf16_optimizer_states": low,
        },
        "fp16": {
            "enabled": held == "fp16",
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }
    if held == "fp32" and precision.compute in ("bf16", "fp16"):
        blocks["torch_autocast"] = {
            "enabled": True,
            "dtype": precision.compute,
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        }
    return blocks


def accumulation_format(precision: Precision, accumulation: int, communication: Format) -> Format:
    """Format in which an optimizer step's gradients are summed over its micro-batches: fp32, so that the split does not matter.
    A single micro-batch sums nothing and keeps the format in which it was reduced, 2 bytes instead of 4."""
    held = weights_format(precision)
    return held if accumulation == 1 and communication == held else "fp32"


def communication_format(precision: Precision, profile: Profile) -> Format:
    """Format in which gradients are reduced over ranks. With fp32 embeddings it is that of all but linear layers, whose
    gradients are reduced in the format of the arithmetic (torch_autocast.py:62)."""
    return weights_format(precision) if profile.communication == "compute" else profile.communication


def announcement(precision: Precision) -> str | None:
    """The line a run logs where its masters are not fp32; None otherwise."""
    if precision.masters == "fp32":
        return None
    return (
        "train.precision.masters = 'bf16': weights and optimizer state are kept in bf16, 6 to 8 bytes a parameter instead of 14; "
        "an update below 1/256 of a weight is lost"
    )


def gpu_capability() -> tuple[int, int] | None:
    """Least compute capability of the GPUs here, as nvidia-smi says; None where it says nothing."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return min((int(major), int(minor)) for major, _, minor in (line.partition(".") for line in said))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check_precision(
    precision: Precision,
    *,
    cuda: bool,
    capability: tuple[int, int] | None,
    profile: Profile,
    accumulation: int,
    tied: bool,
) -> None:
    """LaunchError for formats that do not go together, or that device, ZeRO stage or engine do not give.

    `capability`: of the GPUs, None where unknown; `accumulation`: micro-batches per step; `tied`: whether the base's head is its
    input embedding.
    """
    for refused in (
        _by_device(precision, cuda, capability),
        _by_masters(precision, profile),
        _by_embeddings(precision, profile, tied),
        _by_stage(precision, profile, accumulation),
        _by_communication(precision, profile),
        _by_environment(precision, profile),
    ):
        if refused is not None:
            raise LaunchError(refused)


def _by_device(precision: Precision, cuda: bool, capability: tuple[int, int] | None) -> str | None:
    compute = precision.compute
    if not cuda and compute != "fp32":
        return (
            f"train.precision.compute = '{compute}': not on a CPU (bf16 without matrix units is about 25 times slower, fp16 has "
            "no kernels, tf32 is a format of GPUs); use 'fp32'"
        )
    if compute in ("bf16", "tf32") and capability is not None and capability < AMPERE:
        return (
            f"train.precision.compute = '{compute}': the GPU has compute capability {capability[0]}.{capability[1]}, {compute} "
            "needs 8.0; use 'fp16' or 'fp32'"
        )
    return None


def _by_masters(precision: Precision, profile: Profile) -> str | None:
    if precision.masters == "fp32":
        return None
    what = "train.precision.masters = 'bf16'"
    if precision.compute != "bf16":
        return f"{what} with compute '{precision.compute}': only weights computed in bf16 have bf16 masters; use masters: fp32"
    if precision.embeddings == "fp32":
        return f"{what} with embeddings 'fp32': under autocast the weights are fp32 and are their own masters; use masters: fp32"
    if profile.offload_optimizer != "none":
        return (  # base_optimizer.py:510; accelerate makes the CPU Adam with fp32 moments, which DeepSpeed refuses there
            f"{what} with offload_optimizer: {profile.offload_optimizer}: an optimizer on the CPU keeps its moments in fp32; use "
            "masters: fp32, or offload_optimizer: none"
        )
    return None


def _by_embeddings(precision: Precision, profile: Profile, tied: bool) -> str | None:
    if precision.embeddings == "compute" or precision.compute in ("fp32", "tf32"):
        return None
    what = f"train.precision.embeddings = 'fp32' with compute '{precision.compute}'"
    if precision.compute == "fp16":
        # stage_1_and_2.py:2977 and stage3.py:1240 take the scale off inside the step, after norm and clip: the norm came out
        # 65,536 times too large.
        return f"{what}: the engine would clip the scaled gradient, all but zero; use compute: bf16, or embeddings: compute"
    if profile.zero == 3 and tied:
        # partition_parameters.py:56: a linear layer's weight is gathered in 16 bits, and here that is the embedding
        return (
            f"{what} under zero: 3: the base's head is its embedding and would be gathered in 16 bits; use zero: 2, or "
            "embeddings: compute"
        )
    if profile.zero_plus_plus is not None and profile.zero_plus_plus.quantised_weights:
        return (  # torch_autocast.py:35
            f"{what} with zero_plus_plus.quantised_weights: DeepSpeed has no autocast over quantised weights; use "
            "quantised_weights: false, or embeddings: compute"
        )
    if profile.communication != "compute":
        return (
            f"{what} with communication: {profile.communication}: under autocast DeepSpeed reduces each gradient in the format "
            "of its layer; use communication: compute"
        )
    return None


def _by_stage(precision: Precision, profile: Profile, accumulation: int) -> str | None:
    held = weights_format(precision)
    if held == "fp32":
        return None
    if profile.zero == 0:
        return (
            f"train.precision.compute = '{held}' with zero: 0: DeepSpeed leaves no fp32 shards to export; use zero: 1 or higher, "
            "or embeddings: fp32"
        )
    if held == "bf16" and profile.zero == 1 and accumulation > 1 and profile.offload_optimizer == "none":
        # engine.py:2305 takes BF16_Optimizer then, whose state (bf16_optimizer.py:629) names no ZeRO stage
        return (
            f"train.precision.compute = 'bf16' with zero: 1 and {accumulation} micro-batches a step: summed in fp32, DeepSpeed "
            "leaves shards that its converter does not read; use zero: 2, or a micro_batch that needs one pass"
        )
    return None


def _by_communication(precision: Precision, profile: Profile) -> str | None:
    if profile.communication == "fp16" and precision.compute != "fp16":
        return (
            f"communication: fp16 with train.precision.compute = '{precision.compute}': its gradients are not scaled, and small "
            "ones vanish in fp16; use communication: bf16 or compute"
        )
    return None


def _by_environment(precision: Precision, profile: Profile) -> str | None:
    rendered = launcher_environment(precision)
    rendered["NVIDIA_TF32_OVERRIDE"] = rendered["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"]  # cuBLAS's own switch
    for name, value in rendered.items():
        stated = profile.environment.get(name, value)
        if stated != value:
            return (
                f"environment: {name}={stated} in the profile, but precision.compute '{precision.compute}' makes it {value}; "
                "leave it out of the profile"
            )
    return None
