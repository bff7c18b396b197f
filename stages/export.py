"""ZeRO shards to safetensors that load in the standard loader, checked against the trained model.

Contract: `exported` appears at once and whole, or the earlier one stays. Names, shapes and finiteness are checked, and
the logits against those the trained model left.

Command: python -m stages.export --checkpoint models/checkpoint.json --runs models/runs --model models/base
         --exported models/export --metrics metrics/export.json
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import publish, read_json
from pipeline.base.size import measure
from pipeline.config.errors import ModelError
from pipeline.config.params import ExportParams
from pipeline.exporting.consolidate import export_model
from pipeline.exporting.verify import logit_gap
from pipeline.stage import run_stage


@dataclass(frozen=True)
class ExportMetrics:
    parameters: int
    tensors: int
    bytes: int
    dtype: str
    max_logit_gap: float
    peak_host_gib: float
    seconds: float


def export(export: ExportParams, *, checkpoint: Path, runs: Path, model: Path, exported: Path) -> ExportMetrics:
    """Convert the checkpoint that `checkpoint` describes."""
    start = time.perf_counter()
    record = read_json(checkpoint, "the description of the trained checkpoint")
    shards = runs / record["folder"]
    for name, facts in record["files"].items():
        if not (shards / name).is_file() or (shards / name).stat().st_size != facts["bytes"]:
            raise ModelError(
                f"{shards / name}: not there as trained; copy the run folder from the machine that trained it, or train again: "
                "`dvc repro --force --single-item train`"
            )
    facts = {
        "fingerprint": record["fingerprint"],
        "step": record["step"],
        "stop_token": record["stop_token"],
        "dtype": export.dtype,
    }
    with publish(exported, facts) as folder:
        export_model(
            shards,
            record["zero"],
            model,
            folder,
            stop_token=record["stop_token"],
            dtype=export.dtype,
            max_shard_gib=export.max_shard_gib,
        )
        gap = logit_gap(folder, shards.parent / "probe.safetensors")
        if not gap <= export.max_logit_gap:
            raise ModelError(
                f"logits of the export differ from the trained model's by {gap:.3g}, the limit export.max_logit_gap is "
                f"{export.max_logit_gap:.3g}; a 16-bit export needs a wider limit, else a tensor is wrong"
            )
        size = measure(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return ExportMetrics(
        size.parameters, size.tensors, size.bytes, export.dtype, gap, round(peak, 3), round(time.perf_counter() - start, 3)
    )


if __name__ == "__main__":
    run_stage(export)
