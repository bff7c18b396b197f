"""Kill a run on one rung, resume it, and compare it with the run that was never killed.

Contract: three launches of the rung's own training, with its real save and load path: straight to the end; killed one
step after its checkpoint; resumed from that checkpoint. Then both are exported and compared. `verdict` is written only
if every check passes.

Command: python -m stages.resume --profile profiles/local.yaml --below models/gates/local/smoke.json --model models/base
         --packed data/packed --scratch models/runs --verdict models/gates/local/resume.json --metrics metrics/resume-local.json
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.errors import RunFailed
from pipeline.config.params import ResumeParams, TrainParams
from pipeline.config.schema import load_profile
from pipeline.dataset.manifest import read_packed
from pipeline.exporting.consolidate import export_model
from pipeline.gates import verdict as verdicts
from pipeline.gates.resume_checks import documents_by_step, export_checks, step_checks
from pipeline.stage import run_stage
from pipeline.training import checkpoint as checkpoints
from pipeline.training.curve import read_curve
from pipeline.training.run import make_spec, start
from pipeline.training.spec import run_fingerprint

RANKS = "pipeline.gates.resume_rank"


@dataclass(frozen=True)
class ResumeMetrics:
    checks: dict[str, dict[str, float | bool | None]]
    steps: int
    killed_at: int
    max_loss_gap: float
    ids_equal: bool
    weights_equal: bool


def resume(
    resume: ResumeParams,
    train: TrainParams,
    *,
    profile: Path,
    below: Path,
    model: Path,
    packed: Path,
    scratch: Path,
    verdict: Path,
) -> ResumeMetrics:
    """Run the gate on the rung the profile describes."""
    facts = read_packed(packed, model)
    fingerprint = run_fingerprint(train, model, packed)
    verdicts.require(below, fingerprint)
    settings = load_profile(profile)
    folder = scratch / "gates" / f"resume-{profile.stem}"
    shutil.rmtree(folder, ignore_errors=True)
    straight, broken = folder / "straight", folder / "broken"

    def spec_of(run: Path, resume_from: str | None = None):
        return make_spec(
            fingerprint,
            train,
            settings,
            model=model,
            packed=packed,
            run=run,
            steps=resume.steps,
            resume_from=resume_from,
            checkpoint_every=resume.kill_after,
        )

    ranks = spec_of(straight).ranks
    start(spec_of(straight), module=RANKS, time_limit=resume.time_limit)
    killed_at = resume.kill_after + 1
    output = folder / "killed.log"
    with contextlib.suppress(RunFailed):  # the ranks kill themselves, so no result is what is to be expected
        start(spec_of(broken), module=RANKS, arguments=[str(killed_at)], time_limit=resume.time_limit, output=output)
    newest = checkpoints.find(broken).newest
    if newest is None or killed_at not in documents_by_step(broken, ranks):
        raise RunFailed(f"{broken}: ended before the kill at step {killed_at}, or without a complete checkpoint; see {output}")
    result = start(spec_of(broken, newest.folder.name), module=RANKS, time_limit=resume.time_limit)

    checks = step_checks(
        resume,
        documents_by_step(straight, ranks),
        documents_by_step(broken, ranks),
        read_curve(straight),
        read_curve(broken),
        result,
    )
    for run in (straight, broken):
        last = checkpoints.find(run).newest
        if last is None:
            raise RunFailed(f"{run}: ended without a complete checkpoint")
        export_model(
            last.folder, settings.zero, model, run / "export", stop_token=facts.stop_token, dtype="float32", max_shard_gib=4.0
        )
    checks += export_checks(resume, straight / "export", broken / "export", straight / "probe.safetensors")
    verdicts.judge("resume", profile.stem, checks, folder / "checks.json")
    verdicts.write_verdict(verdict, "resume", profile.stem, fingerprint)
    values = {check.name: check.value for check in checks}
    return ResumeMetrics(
        checks=verdicts.as_metrics(checks),
        steps=resume.steps,
        killed_at=killed_at,
        max_loss_gap=values["loss"],
        ids_equal=values["data_order"] == 0,
        weights_equal=values["weights"] == 0,
    )


if __name__ == "__main__":
    run_stage(resume)
