"""One precision field, rendered for loader, trainer and engine alike; what the device lacks is refused before launch.

Master weights and optimizer state are fp32 in all three precisions.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.errors import LaunchError


def check_precision(precision: str, *, cuda: bool, zero: int) -> None:
    """LaunchError for a precision that the device or the ZeRO stage cannot give."""
    if precision != "fp32" and not cuda:
        raise LaunchError(
            f"train.precision = '{precision}': not on a CPU (bf16 without matrix units is about 25 times "
            "slower, fp16 has no kernels); use 'fp32'"
        )
    if precision != "fp32" and zero == 0:
        raise LaunchError(f"train.precision = '{precision}' with zero: 0: no fp32 shards to export; use zero: 1 or higher")


def trainer_arguments(precision: str) -> dict[str, Any]:
    """The fields of TrainingArguments."""
    return {"bf16": precision == "bf16", "fp16": precision == "fp16"}


def engine_config(precision: str) -> dict[str, Any]:
    """The blocks of the DeepSpeed configuration. fp16 scaling starts at 2^16 and never goes below 1."""
    return {
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {
            "enabled": precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }
