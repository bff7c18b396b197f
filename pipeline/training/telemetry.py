"""What a run tells while it goes: one JSON line per step, one progress line for a person.

Contract: rank 0 appends to `RUN/curve.jsonl`: step, loss, grad_norm (before clipping), learning_rate, seconds (since
the ranks started training). A resumed run drops lines after its checkpoint first, so that a step stands there once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pipeline.training.curve import CURVE, read_curve

_STATUS = Path("/proc/self/status")

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by part of the device's name (makers' data sheets); other devices have no MFU."""


class Curve(TrainerCallback):
    """Writes the curve and the progress line; add it on rank 0 only."""

    def __init__(self, run: Path, from_step: int) -> None:
        self._path = run / CURVE
        kept = [line for line in read_curve(run) if line["step"] <= from_step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._start = time.perf_counter()
        self._first = from_step
        self._shown = 0.0

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:  # the summary at the end
            return
        seconds = time.perf_counter() - self._start
        line = {key: logs[key] for key in ("loss", "grad_norm", "learning_rate")}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **line, "seconds": round(seconds, 3)}) + "\n")
        done = state.global_step - self._first
        if seconds - self._shown > 2 or state.global_step == state.max_steps:
            self._shown = seconds
            left = (state.max_steps - state.global_step) * seconds / done
            print(
                f"  step {state.global_step}/{state.max_steps}  loss {line['loss']:.4f}  "
                f"{done / seconds:.1f} steps/s  {left:.0f} s left",
                file=sys.stderr,
            )


def peak_memory_bytes(cuda: bool) -> int:
    """Largest memory of this rank since the start or `forget_peak_memory`: allocated on the GPU, or resident."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    if _STATUS.is_file():
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(cuda: bool) -> None:
    """Begin to measure anew; where the kernel does not offer it, the peak since the start stays."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM (man 5 proc)


def model_flops_utilisation(parameters: int, tokens_per_second: float) -> float | None:
    """6 x parameters x tokens/s over the device's dense bf16 peak (arXiv:2204.02311, without the attention term)."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return round(6 * parameters * tokens_per_second / peak, 4) if peak else None
