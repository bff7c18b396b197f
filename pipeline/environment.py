"""The environment of every process of the product: nothing phones home, nothing waits for a hub, nothing chatters.

Contract: `quiet` is called before a library is imported that reads these once, by `stages/__init__.py` and `cli.py`;
children inherit them. A value the user has set stays. `cores` is how much of the machine a process may use.
"""

from __future__ import annotations

import os

from pipeline.launch.local import gpus_found

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DELAY": "2",  # a bar only for what takes longer than two seconds
    "TRANSFORMERS_VERBOSITY": "error",
}


def quiet() -> None:
    """Complete this process's environment."""
    device = "cuda" if gpus_found() else "cpu"  # DeepSpeed would otherwise look for one and warn
    for name, value in {**QUIET, "DS_ACCELERATOR": device}.items():
        os.environ.setdefault(name, value)


def cores() -> int:
    """Cores this process may use, which `taskset` and a batch system can restrict; all of them where a system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
