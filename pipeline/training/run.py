"""A stage's side of a run: how it is split, where it lives, how it is started; imports no torch.

Contract: `plan` turns params and profile into ranks and batches or raises LaunchError before anything starts. `start`
launches the ranks and returns their result; Resumable when they stopped on request, RunFailed when they ended without
one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config.errors import LaunchError, Resumable, RunFailed
from pipeline.config.params import TrainParams
from pipeline.config.profile import Profile
from pipeline.launch.local import gpus_found, launch
from pipeline.launch.process import asked_to_stop
from pipeline.training.batching import accumulation_for
from pipeline.training.precision import check_precision
from pipeline.training.spec import RANK_MODULE, Spec


@dataclass(frozen=True)
class Plan:
    """How one global batch is split on this machine."""

    cuda: bool
    ranks: int
    threads: int
    accumulation: int


def plan(params: TrainParams, profile: Profile) -> Plan:
    """Work out the split of a profile on the machine at hand."""
    gpus = gpus_found()
    if profile.device == "cuda" and not gpus:
        raise LaunchError(
            "device: cuda: no GPU is visible here; use device: auto or cpu, or run `nvidia-smi` to see what is there"
        )
    cuda = gpus > 0 and profile.device != "cpu"
    fitting = [r for r in range(1, gpus + 1) if params.global_batch % (profile.micro_batch * r) == 0]
    ranks = profile.ranks
    if ranks == "auto":
        ranks = (fitting[-1] if fitting else gpus) if cuda else 2
    if cuda and ranks > gpus:
        raise LaunchError(f"ranks: {ranks}: only {gpus} GPUs are visible here; use ranks: {gpus} or auto")
    check_precision(params.precision, cuda=cuda, zero=profile.zero)
    threads = profile.threads_per_rank
    if threads == "auto":
        threads = max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1
    return Plan(cuda, ranks, threads, accumulation_for(params.global_batch, profile.micro_batch, ranks))


def make_spec(
    fingerprint: str,
    params: TrainParams,
    profile: Profile,
    *,
    model: Path,
    packed: Path,
    run: Path,
    steps: int,
    sequences: Sequence[int] | None = None,
    resume_from: str | None = None,
    checkpoint_every: int | None = None,
) -> Spec:
    """The spec of a run; gates give their own subset, steps and checkpoint interval."""
    split = plan(params, profile)
    return Spec(
        fingerprint=fingerprint,
        model=str(model),
        packed=str(packed),
        run=str(run),
        params=params,
        steps=steps,
        sequences=list(sequences) if sequences is not None else None,
        resume_from=resume_from,
        cuda=split.cuda,
        ranks=split.ranks,
        threads=split.threads,
        micro_batch=profile.micro_batch,
        accumulation=split.accumulation,
        zero=profile.zero,
        activation_checkpointing=profile.activation_checkpointing,
        checkpoint_every=checkpoint_every or profile.checkpoint_every,
    )


def start(
    spec: Spec,
    profile: Profile,
    *,
    module: str = RANK_MODULE,
    arguments: Sequence[str] = (),
    time_limit: float | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Launch the ranks of a spec and return `result.json`."""
    result = Path(spec.run) / "result.json"
    result.unlink(missing_ok=True)
    path = spec.save()
    try:
        status = launch(
            module,
            [str(path), *arguments],
            ranks=spec.ranks,
            cuda=spec.cuda,
            environment=profile.environment,
            time_limit=time_limit,
            output=output,
        )
    except TimeoutError as error:
        raise RunFailed(
            f"{spec.run}: {error}; every rank was ended; see which step the curve reached, or raise the time limit"
        ) from error
    if not result.is_file():
        if asked_to_stop():
            raise Resumable("stopped on request before a step was saved; the next run continues from the last checkpoint")
        raise RunFailed(f"{spec.run}: the ranks ended with status {status} and without a result; the first rank's error is above")
    found = read_json(result, "the result of the run")
    if found["outcome"] == "stopped":
        raise Resumable(f"stopped on request at step {found['step']} of {spec.steps}, saved; the next run continues there")
    return found
