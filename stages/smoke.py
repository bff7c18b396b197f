"""Train a hundred samples on one rung and check everything that a hundred samples can show.

Contract: `verdict` is written only if every check passes; its content is fixed. The checks of a failed gate can be read in
`scratch/gates/smoke-RUNG/checks.json`.

Command: python -m stages.smoke --profile profiles/local.yaml --below models/gates/ground/resume.json --model models/base
         --formatted data/formatted --packed data/packed --scratch models/runs
         --verdict models/gates/local/smoke.json --metrics metrics/smoke-local.json
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import read_json
from pipeline.config.params import LoraTuning, SmokeParams, TrainParams
from pipeline.config.schema import load_profile
from pipeline.dataset.manifest import read_packed_of
from pipeline.dataset.masking import load_tokenizer
from pipeline.gates import verdict as verdicts
from pipeline.gates.smoke_checks import choose_sequences, documents_due, mask_checks, run_checks
from pipeline.stage import run_stage
from pipeline.training.batching import steps_for
from pipeline.training.curve import read_curve
from pipeline.training.run import make_spec, start
from pipeline.training.spec import run_fingerprint


@dataclass(frozen=True)
class SmokeMetrics:
    checks: dict[str, dict[str, float | bool | None]]
    loss_first: float
    loss_last: float
    tokens_per_second_per_gpu: float
    peak_gib_measured: float
    peak_gib_planned: float | None
    seconds: float


def smoke(
    smoke: SmokeParams,
    train: TrainParams,
    *,
    profile: Path,
    below: Path,
    model: Path,
    formatted: Path,
    packed: Path,
    scratch: Path,
    verdict: Path,
) -> SmokeMetrics:
    """Run the gate on the rung the profile describes."""
    facts = read_packed_of(packed, formatted, model)
    fingerprint = run_fingerprint(train, model, packed)
    verdicts.require(below, fingerprint)
    sequences = choose_sequences(packed, smoke.samples, train.global_batch)
    checks = mask_checks(packed, formatted, load_tokenizer(model), facts.stop_token_id, sequences)
    run = scratch / "gates" / f"smoke-{profile.stem}"
    shutil.rmtree(run, ignore_errors=True)
    steps = steps_for(len(sequences), smoke.epochs, train.global_batch)
    settings = load_profile(profile)
    spec = make_spec(
        fingerprint,
        without_dropout(train),
        settings,
        model=model,
        packed=packed,
        run=run,
        steps=steps,
        sequences=sequences,
        checkpoint_every=steps,
    )
    result = start(spec, module="pipeline.gates.smoke_rank", arguments=[str(formatted)], time_limit=smoke.time_limit)
    report = read_json(run / "smoke.json", "the smoke gate's report")
    due = documents_due(packed, sequences, train.seed, train.global_batch, steps)
    checks += run_checks(smoke, due, read_curve(run), report, result)
    verdicts.judge("smoke", profile.stem, checks, run / "checks.json")
    verdicts.write_verdict(verdict, "smoke", profile.stem, fingerprint)
    return SmokeMetrics(
        checks=verdicts.as_metrics(checks),
        loss_first=result["loss_first"],
        loss_last=result["loss_last"],
        tokens_per_second_per_gpu=result["tokens_per_second_per_gpu"],
        peak_gib_measured=round(max(result["peak_bytes"]) / 2**30, 3),
        peak_gib_planned=None,
        seconds=result["seconds"],
    )


def without_dropout(train: TrainParams) -> TrainParams:
    """Adapters' dropout off: what is compared with a single process must not depend on a draw."""
    if isinstance(train.tuning, LoraTuning):
        return train.model_copy(update={"tuning": train.tuning.model_copy(update={"dropout": 0.0})})
    return train


if __name__ == "__main__":
    run_stage(smoke)
