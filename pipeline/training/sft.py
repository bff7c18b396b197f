"""The one training function: TRL's SFTTrainer on a DeepSpeed engine, the same on every rank.

Contract: reads a Spec and packed data that is ready (nothing is tokenised or mapped here), writes checkpoints and the
curve into the run folder, and last `result.json`. On TERM or USR1 all ranks agree at a step border, save and stop.

Command: torchrun --nproc_per_node RANKS -m pipeline.training.sft SPEC.json (stages start it so).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig

from pipeline.artifact import read_manifest, write_json
from pipeline.dataset.manifest import packed_files
from pipeline.training import attention, kernels, precision, tuning
from pipeline.training.clipping import limit_of
from pipeline.training.collate import PackedCollator
from pipeline.training.curve import read_curve
from pipeline.training.sequence import group_of, process_group
from pipeline.training.spec import Spec, load_spec
from pipeline.training.telemetry import peak_flops, peak_memory_bytes
from pipeline.training.trainer import AfterEachStep, PackedTrainer, to_device
from pipeline.training.zero import deepspeed_config, operators

RESULT = "result.json"
OUT_OF_MEMORY = "out-of-memory.json"
PROBE = "probe.safetensors"
PROBE_TOKENS = 64
"""Tokens whose logits the trained model leaves behind, so that the export can be held against it."""


@dataclass(frozen=True)
class Session:
    """A prepared run on one rank."""

    spec: Spec
    trainer: PackedTrainer
    packed: Any
    """The training sequences, as a `datasets.Dataset`."""

    @property
    def model(self) -> Any:
        """The module that is trained."""
        return self.trainer.model

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine around it, once training has begun."""
        return self.trainer.model_wrapped


def load_model(spec: Spec, attention: str) -> Any:
    """The base model of a spec with the named attention."""
    quantised = spec.params.tuning.kind == "qlora"
    return AutoModelForCausalLM.from_pretrained(
        spec.model,
        dtype=precision.load_dtype(spec.params.precision),
        attn_implementation=attention,
        quantization_config=tuning.quantisation(spec.params),
        device_map={"": int(os.environ["LOCAL_RANK"])} if quantised else None,
    )


def prepare(spec: Spec, load: Callable[[Spec, str], Any] = load_model) -> Session:
    """Join the process group, then arguments, then model: in this order, or ranks and batch sizes read as one."""
    params, profile = spec.params, spec.profile
    torch.set_num_threads(spec.threads)
    if spec.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # The shared-memory op serves inference only; building it would need a compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if spec.cuda else "gloo")
    _build_operators(spec)
    arguments = _arguments(spec)
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    name, why = attention.choose(profile.attention, cuda=spec.cuda, sequence_parallel=profile.sequence_parallel)
    attention.register(process_group(profile.sequence_parallel) if profile.sequence_parallel > 1 else None)
    if arguments.should_save:
        print(f"  attention: {name} ({why}); kernels: {profile.kernels}; ZeRO-{profile.zero}", file=sys.stderr)
        if line := precision.announcement(params.precision):
            print(f"  {line}", file=sys.stderr)
    model = load(spec, name)
    kernels.use_kernels(model, profile.kernels, zero=profile.zero, cuda=spec.cuda)
    kernels.tile_mlp(model, profile.tiled_mlp)
    kernels.checkpoint_activations(model, profile.activation_checkpointing)
    packed = load_packed(Path(spec.packed), "train")
    if spec.sequences is not None:
        packed = packed.select(spec.sequences)
    trainer = PackedTrainer(
        spec,
        limit_of(params.clipping),
        model=model,
        args=arguments,
        train_dataset=packed,
        processing_class=tokenizer,
        data_collator=_collator(spec),
        peft_config=tuning.adapters(params.tuning),
    )
    trainer.remove_callback(PrinterCallback)  # the curve has a line per step and its own progress line
    return Session(spec, trainer, packed)


def _build_operators(spec: Spec) -> None:
    """Compile what DeepSpeed will load, once on each host: ranks that start at once would each wait for the others' lock, with
    a collective of somebody already running."""
    names = operators(spec)
    if names and os.environ["LOCAL_RANK"] == "0":
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        for name in names:
            ALL_OPS[name].load()
    if names:
        dist.barrier()


def _collator(spec: Spec) -> PackedCollator:
    """Filled up to one size where blocks are compiled for it."""
    capacity = read_manifest(Path(spec.packed), "the packed set")["max_length"]
    fixed = spec.micro_batch * capacity if spec.profile.kernels == "compiled" else None
    _, place = group_of(dist.get_rank(), spec.profile.sequence_parallel)
    return PackedCollator(longest=capacity, fixed_tokens=fixed, share=(place, spec.profile.sequence_parallel))


def load_packed(folder: Path, split: str) -> Any:
    """The sequences of a packed split, mapped into memory, shard after shard."""
    return concatenate_datasets([Dataset.from_file(path) for path in packed_files(folder, split)])


def train(session: Session, observers: Sequence[TrainerCallback] = ()) -> dict[str, Any]:
    """Train to the last step or until asked to stop; return (on every rank) and write (rank 0) the result."""
    spec, trainer, run = session.spec, session.trainer, Path(session.spec.run)
    after = AfterEachStep(trainer)
    trainer.add_callback(after)
    for observer in observers:
        trainer.add_callback(observer)
    resumed_from = 0
    if spec.resume_from is not None:
        resumed_from = int(spec.resume_from.rpartition("-")[2])
        trainer.limit.load(run / spec.resume_from)
    trainer.curve.begin(resumed_from)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(run / spec.resume_from) if spec.resume_from is not None else None)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"outcome": "stopped" if after.stopped else "finished", "step": trainer.state.global_step}
    if not after.stopped:
        result |= _summary(session, seconds, resumed_from)
    if trainer.args.should_save:
        write_json(run / RESULT, result)
    return result


def _arguments(spec: Spec) -> SFTConfig:
    params = spec.params
    formats: Any = precision.trainer_arguments(params.precision)
    return SFTConfig(
        output_dir=spec.run,
        deepspeed=deepspeed_config(spec),
        use_cpu=not spec.cuda,
        per_device_train_batch_size=spec.micro_batch,
        gradient_accumulation_steps=spec.accumulation,
        max_steps=spec.steps,
        learning_rate=params.learning_rate,
        lr_scheduler_type=params.schedule if params.schedule != "constant" else "constant_with_warmup",
        warmup_steps=round(params.warmup_share * spec.steps),
        weight_decay=params.weight_decay,
        adam_beta1=params.adam_beta1,
        adam_beta2=params.adam_beta2,
        adam_epsilon=params.adam_epsilon,
        max_grad_norm=params.clipping.max_norm,
        # Fused where it runs on the GPU; offloaded, accelerate puts DeepSpeed's CPU Adam in the place of the plain one.
        optim="adamw_torch_fused" if spec.cuda and spec.profile.offload_optimizer == "none" else "adamw_torch",
        seed=params.seed,
        **formats,
        gradient_checkpointing=False,  # `kernels.checkpoint_activations`
        save_strategy="steps",
        save_steps=spec.checkpoint_every,
        logging_strategy="no",  # the curve is ours, and waits for no step
        logging_nan_inf_filter=False,  # a NaN must be seen, not averaged away
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )


def _summary(session: Session, seconds: float, resumed_from: int) -> dict[str, Any]:
    """The figures of a finished run; collective, so every rank calls it."""
    spec, trainer = session.spec, session.trainer
    counted = torch.tensor([trainer.tokens, trainer.attended], device=trainer.args.device)
    dist.all_reduce(counted)
    tokens, attended = counted.tolist()
    steps = trainer.state.global_step - resumed_from
    memory = _gathered(peak_memory_bytes(spec.cuda))
    eval_loss = held_out_loss(session)
    if trainer.args.should_save:
        _save_probe(session)
    elif spec.profile.zero == 3 or spec.profile.sequence_parallel > 1:
        _probe_logits(session)  # every rank takes part in gathering the weights
    curve = read_curve(Path(spec.run))
    peak = peak_flops()
    flops = spec.shape.flops_per_token(attended / tokens) * tokens if tokens else 0.0
    return {
        "steps_run": steps,
        "resumed_from": resumed_from,
        "tokens": tokens,
        "loss_first": curve[0]["loss"] if curve else None,
        "loss_last": _mean([line["loss"] for line in curve[-10:]]),
        "clip_share": _mean([float(line["grad_norm"] > line["limit"]) for line in curve]),
        "eval_loss": eval_loss,
        "tokens_per_second_per_gpu": round(tokens / seconds / spec.ranks, 1),
        "mfu": round(flops / seconds / spec.ranks / peak, 4) if peak else None,
        "peak_bytes": memory,
        "seconds": round(seconds, 3),
        "world_size": spec.ranks,
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "python": sys.version.split()[0]},
    }


def held_out_loss(session: Session) -> float | None:
    """Mean negative log-likelihood per supervised token of the validation split (nats); None where it is empty.

    Each group of ranks takes every so many-th micro-batch; one that has run out repeats the last without counting it, since
    under ZeRO-3 all must call forward.
    """
    spec, trainer = session.spec, session.trainer
    rows = load_packed(Path(spec.packed), "validation").with_format("numpy")
    if not len(rows):
        return None
    model, collate = session.engine, _collator(spec)
    group, _ = group_of(dist.get_rank(), spec.profile.sequence_parallel)
    groups, size = spec.ranks // spec.profile.sequence_parallel, spec.micro_batch
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    starts = range(0, len(rows), size)
    for first in range(0, len(starts), groups):
        mine = first + group
        start = starts[min(mine, len(starts) - 1)]
        batch = collate([rows[i] for i in range(start, min(start + size, len(rows)))])
        inputs = to_device(batch, trainer.args.device, compiled=spec.profile.kernels == "compiled")
        for name in ("documents", "tokens", "attended"):
            inputs.pop(name)
        with torch.no_grad():
            summed = model(**inputs)
        if mine < len(starts):
            total += torch.stack([summed.double(), total.new_tensor(inputs["supervised"].numel())])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _probe_logits(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    device, parallel = session.trainer.args.device, session.spec.profile.sequence_parallel
    row = session.packed[0]["input_ids"]
    ids = torch.tensor([row[: min(PROBE_TOKENS, len(row)) // parallel * parallel]], device=device)
    part = ids.shape[1] // parallel
    positions = torch.arange(ids.shape[1], device=device)[None]
    _, place = group_of(dist.get_rank(), parallel)
    mine = slice(place * part, (place + 1) * part)
    model = session.engine
    model.eval()
    bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32, device=device)
    with torch.no_grad():
        made = model(
            input_ids=ids[:, mine],
            position_ids=positions[:, mine],
            cu_seq_lens_q=bounds,
            max_length_q=ids.shape[1],
            use_cache=False,
        ).logits.float()
    return ids[:, mine], made


def _save_probe(session: Session) -> None:
    """Leave ids and logits of the trained model beside the last checkpoint."""
    from safetensors.torch import save_file

    ids, logits = _probe_logits(session)
    save_file({"input_ids": ids.cpu(), "logits": logits.cpu().contiguous()}, Path(session.spec.run) / PROBE)


def _gathered(value: int) -> list[int]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def close() -> None:
    """End the process group; a finished gloo run can abort at exit otherwise."""
    dist.barrier()
    dist.destroy_process_group()


def guarded(spec: Spec, work: Callable[[Spec], None]) -> None:
    """Do the work of a rank; where the GPU's memory does not suffice, leave word of what it held."""
    try:
        work(spec)
    except torch.OutOfMemoryError as error:
        held = {
            "rank": dist.get_rank(),
            "said": str(error).splitlines()[0],
            "allocated_bytes": torch.cuda.memory_allocated() if spec.cuda else 0,
            "peak_bytes": torch.cuda.max_memory_allocated() if spec.cuda else 0,
        }
        write_json(Path(spec.run) / OUT_OF_MEMORY, held)
        raise


def main(spec: Spec) -> None:
    train(prepare(spec))
    close()


if __name__ == "__main__":
    guarded(load_spec(Path(sys.argv[1])), main)
