"""Supervised fine-tuning on the top rung of the ladder, resumable.

Contract: starts only with the verdicts of smoke and resume for exactly this run. Works in `runs/FINGERPRINT`, which is
no output of DVC's: a stopped or killed run continues there, a finished one is not repeated. `checkpoint` describes the
last checkpoint with hashes.

Command: python -m stages.train --profiles profiles --gates models/gates --model models/base --packed data/packed
         --runs models/runs --checkpoint models/checkpoint.json --curve plots/train.jsonl --metrics metrics/train.json
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import read_json, write_json
from pipeline.config.errors import LaunchError, ModelError
from pipeline.config.params import Ladder, TrainParams
from pipeline.config.schema import load_profile
from pipeline.dataset.manifest import read_packed
from pipeline.gates import verdict
from pipeline.stage import run_stage
from pipeline.training import checkpoint as checkpoints
from pipeline.training.batching import steps_for
from pipeline.training.owner import owned
from pipeline.training.run import make_spec, plan, start
from pipeline.training.spec import run_fingerprint


@dataclass(frozen=True)
class TrainMetrics:
    steps: int
    tokens: int
    loss_first: float
    loss_last: float
    eval_loss: float | None
    tokens_per_second_per_gpu: float
    mfu: float | None
    peak_gib: float
    seconds: float
    clip_share: float
    world_size: int
    resumed_from: int


def train(
    ladder: Ladder,
    train: TrainParams,
    *,
    profiles: Path,
    gates: Path,
    model: Path,
    packed: Path,
    runs: Path,
    checkpoint: Path,
    curve: Path,
) -> TrainMetrics:
    """Train, or continue, or find the run finished."""
    facts = read_packed(packed, model)
    fingerprint = run_fingerprint(train, model, packed)
    for gate in verdict.GATES:
        verdict.require(gates / ladder.top / f"{gate}.json", fingerprint)
    profile = load_profile(profiles / f"{ladder.top}.yaml")
    steps = steps_for(facts.train_sequences, train.epochs, train.global_batch)
    run = runs / fingerprint
    with owned(run):
        found = checkpoints.find(run)
        for name in found.incomplete:
            print(f"train: {run / name} is not complete and is left alone", file=sys.stderr)
        newest = found.newest
        if newest is not None and newest.step == steps and (run / "result.json").is_file():
            print(f"train: run {fingerprint[:12]} is finished ({steps} steps); nothing to do", file=sys.stderr)
            result = read_json(run / "result.json", "the result of the run")
        else:
            split = plan(train, profile)
            if newest is not None and (newest.facts["ranks"], newest.facts["zero"]) != (split.ranks, profile.zero):
                raise LaunchError(
                    f"{newest.folder}: saved by {newest.facts['ranks']} ranks with ZeRO {newest.facts['zero']}, this rung has "
                    f"{split.ranks} ranks with ZeRO {profile.zero}, and shards fit one size only; continue on that size, or "
                    "delete the run folder to train from the start"
                )
            resume_from = newest.folder.name if newest is not None else None
            where = f"continues at {resume_from}" if resume_from else "from the start"
            print(f"train: run {fingerprint[:12]}, {steps} steps, {where}", file=sys.stderr)
            spec = make_spec(
                fingerprint, train, profile, model=model, packed=packed, run=run, steps=steps, resume_from=resume_from
            )
            result = start(spec)
        last = checkpoints.find(run).newest
        if last is None or last.step != steps:
            raise ModelError(f"{run}: finished without a complete checkpoint of step {steps}; delete the folder and train again")
        record = {
            "fingerprint": fingerprint,
            "stop_token": facts.stop_token,
            "precision": train.precision.compute,
            "tuning": train.tuning.kind,
        }
        write_json(checkpoint, {**record, **checkpoints.describe(last, runs)})
        curve.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / "curve.jsonl", curve)
    return TrainMetrics(
        steps=steps,
        tokens=result["tokens"],
        loss_first=result["loss_first"],
        loss_last=result["loss_last"],
        eval_loss=result["eval_loss"],
        tokens_per_second_per_gpu=result["tokens_per_second_per_gpu"],
        mfu=result["mfu"],
        peak_gib=round(max(result["peak_bytes"]) / 2**30, 3),
        seconds=result["seconds"],
        clip_share=result["clip_share"],
        world_size=result["world_size"],
        resumed_from=result["resumed_from"],
    )


if __name__ == "__main__":
    run_stage(train)
