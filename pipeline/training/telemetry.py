"""What a rank knows of its machine: peak memory, and the arithmetic its GPU is sold for."""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by part of the device's name (makers' data sheets); other devices have no MFU."""


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


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this GPU, None where it is not listed or there is none."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
