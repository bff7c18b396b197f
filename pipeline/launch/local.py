"""Ranks on this machine, by torchrun.

Contract: `launch` starts `ranks` processes of a module with one argument, in a process tree that ends with us, and
returns the exit status. `--standalone` takes a free port, so runs side by side do not meet.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.launch.process import run_tree

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Blocks of the GPU's memory grow instead of being cut: 4 GiB less reserved at 93 in use, where sizes change.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Renames between libraries, and a barrier's choice of device: one line per rank and start, nothing to act on.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:torch.distributed.c10d_logger",
    "ACCELERATE_LOG_LEVEL": "error",  # it is surprised by an accumulation that stands in DeepSpeed's configuration
}


def gpus_found() -> int:
    """GPUs this process may use, without importing torch: device files of NVIDIA's driver, less what
    CUDA_VISIBLE_DEVICES hides."""
    files = [p for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return min(len(files), len([v for v in visible.split(",") if v.strip()])) if visible is not None else len(files)


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    cuda: bool,
    environment: Mapping[str, str],
    time_limit: float | None,
    output: Path | None = None,
) -> int:
    """Run `python -m MODULE ARGUMENTS...` on every rank; TimeoutError after `time_limit` seconds. `output`: a file for
    what the ranks print."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        "-m",
        module,
        *arguments,
    ]
    env = {**os.environ, **RANK_ENVIRONMENT, "DS_ACCELERATOR": "cuda" if cuda else "cpu", **environment}
    if not cuda:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return run_tree(command, env=env, timeout=time_limit, output=output)
