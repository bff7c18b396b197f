"""A stage's side of a run: how it is split, where it lives, how it is started; imports no torch until a run starts.

Contract: `make_spec` turns params and profile into ranks and batches, and raises LaunchError (ConfigError for an override) for
what cannot work, before anything starts. `start` launches the ranks and returns their result; Resumable when they stopped on
request, RunFailed when they ended without one. Ranks that ran out of GPU memory are started again with a smaller plan where the
profile allows it: half the micro-batch while there is one, then every activation computed again. The global batch, and with it
the result, stays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config.errors import LaunchError, Resumable, RunFailed
from pipeline.config.params import TrainParams
from pipeline.config.profile import Profile
from pipeline.environment import cores
from pipeline.launch.local import gpus_found, launch
from pipeline.launch.process import asked_to_stop
from pipeline.training import checkpoint as checkpoints
from pipeline.training.bases import check_base
from pipeline.training.batching import accumulation_for
from pipeline.training.precision import check_precision, gpu_capability, launcher_environment
from pipeline.training.shape import read_shape
from pipeline.training.spec import RANK_MODULE, Spec
from pipeline.training.tuning import check_tuning
from pipeline.training.validity import check_config
from pipeline.training.zero import check_zero, deepspeed_config


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
    shared = profile.sequence_parallel
    fitting = [r for r in range(shared, gpus + 1, shared) if params.global_batch % (profile.micro_batch * (r // shared)) == 0]
    ranks = profile.ranks
    if ranks == "auto":
        ranks = (fitting[-1] if fitting else gpus) if cuda else 2
    if cuda and ranks > gpus:
        raise LaunchError(f"ranks: {ranks}: only {gpus} GPUs are visible here; use ranks: {gpus} or auto")
    if ranks % shared:
        raise LaunchError(
            f"sequence_parallel: {shared}: must divide the {ranks} ranks; nearest: {ranks // shared * shared or shared}"
        )
    threads = profile.threads_per_rank
    if threads == "auto":
        threads = max(1, cores() // ranks)
    return Plan(cuda, ranks, threads, accumulation_for(params.global_batch, profile.micro_batch, ranks // shared))


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
    """The spec of a run, checked; gates give their own subset, steps and checkpoint interval."""
    split, shape = plan(params, profile), read_shape(model)
    spec = Spec(
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
        profile=profile,
        micro_batch=profile.micro_batch,
        accumulation=split.accumulation,
        checkpoint_every=checkpoint_every or profile.checkpoint_every,
        shape=shape,
    )
    _check(spec)
    return spec


def _check(spec: Spec) -> None:
    """LaunchError or ConfigError for what cannot work."""
    check_precision(
        spec.params.precision,
        cuda=spec.cuda,
        capability=gpu_capability() if spec.cuda else None,
        profile=spec.profile,
        accumulation=spec.accumulation,
        tied=spec.shape.tied,
    )
    check_tuning(spec.params, cuda=spec.cuda, profile=spec.profile, shape=spec.shape, model=Path(spec.model))
    check_base(Path(spec.model), spec.shape, spec.profile)
    check_zero(spec)
    check_config(deepspeed_config(spec))
    from pipeline.training import attention, kernels  # torch; the line before has imported it

    attention.choose(spec.profile.attention, cuda=spec.cuda, sequence_parallel=spec.profile.sequence_parallel)
    kernels.check_kernels(spec.profile.kernels, cuda=spec.cuda)


def start(
    spec: Spec,
    *,
    module: str = RANK_MODULE,
    arguments: Sequence[str] = (),
    time_limit: float | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Launch the ranks of a spec and return `result.json`."""
    run = Path(spec.run)
    result, memory = run / "result.json", run / "out-of-memory.json"
    while True:
        for file in (result, memory):
            file.unlink(missing_ok=True)
        status = _launch(spec, module, arguments, time_limit, output)
        if result.is_file() or not memory.is_file():
            break
        held = read_json(memory, "the word that the ranks left")
        said = (
            f"{run}: rank {held['rank']} ran out of GPU memory with {held['allocated_bytes'] / 2**30:.1f} GiB held, "
            f"{held['peak_bytes'] / 2**30:.1f} at most ({held['said']})"
        )
        following = smaller(spec) if spec.profile.on_out_of_memory == "smaller" else None
        if following is None:
            raise RunFailed(
                f"{said}; use a smaller micro_batch, activation_checkpointing: 1.0, a higher zero stage, or offload"
                + (", or on_out_of_memory: smaller" if smaller(spec) and spec.profile.on_out_of_memory == "fail" else "")
            )
        newest = checkpoints.find(run).newest
        spec = following.model_copy(update={"resume_from": newest.folder.name if newest else spec.resume_from})
        print(
            f"{said}; next: micro_batch {spec.micro_batch} x accumulation {spec.accumulation}, activation_checkpointing "
            f"{spec.profile.activation_checkpointing}",
            file=sys.stderr,
        )
    if not result.is_file():
        if asked_to_stop():
            raise Resumable("stopped on request before a step was saved; the next run continues from the last checkpoint")
        raise RunFailed(f"{run}: the ranks ended with status {status} and without a result; the first rank's error is above")
    found = read_json(result, "the result of the run")
    if found["outcome"] == "stopped":
        raise Resumable(f"stopped on request at step {found['step']} of {spec.steps}, saved; the next run continues there")
    return found


def smaller(spec: Spec) -> Spec | None:
    """The next plan that needs less GPU memory for the same global batch; None after the last."""
    if spec.micro_batch % 2 == 0:
        halved = spec.model_copy(update={"micro_batch": spec.micro_batch // 2, "accumulation": spec.accumulation * 2})
        with contextlib.suppress(LaunchError):  # ZeRO-1 in bf16 cannot accumulate
            _check(halved)
            return halved
    if spec.profile.activation_checkpointing < 1:
        return spec.model_copy(update={"profile": spec.profile.model_copy(update={"activation_checkpointing": 1.0})})
    return None


def _launch(spec: Spec, module: str, arguments: Sequence[str], time_limit: float | None, output: Path | None) -> int:
    try:
        return launch(
            module,
            [str(spec.save()), *arguments],
            ranks=spec.ranks,
            cuda=spec.cuda,
            environment={**launcher_environment(spec.params.precision), **spec.profile.environment},
            time_limit=time_limit,
            output=output,
        )
    except TimeoutError as error:
        raise RunFailed(
            f"{spec.run}: {error}; every rank was ended; see which step the curve reached, or raise the time limit"
        ) from error
