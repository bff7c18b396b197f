"""The one training function: TRL's SFTTrainer on a DeepSpeed engine, the same on every rank.

Contract: reads a Spec and packed data that is ready (nothing is tokenised or mapped here), writes checkpoints and the
curve into the run folder, and last `result.json`. On TERM or USR1 all ranks agree at a step border, save and stop.

Command: torchrun --nproc_per_node RANKS -m pipeline.training.sft SPEC.json (stages start it so).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

from pipeline.artifact import write_json
from pipeline.config.params import LoraTuning
from pipeline.dataset.manifest import packed_files
from pipeline.training import attention, checkpoint, precision
from pipeline.training.batching import DataOrder
from pipeline.training.curve import read_curve
from pipeline.training.spec import Spec, load_spec
from pipeline.training.telemetry import Curve, model_flops_utilisation, peak_memory_bytes
from pipeline.training.zero import deepspeed_config

RESULT = "result.json"
PROBE = "probe.safetensors"
PROBE_TOKENS = 64
"""Tokens whose logits the trained model leaves behind, so that the export can be held against it."""


class PackedCollator(DataCollatorForLanguageModeling):
    """TRL's padding-free collator, which also passes on the row numbers of the documents in the batch."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        batch["documents"] = torch.tensor([row for example in examples for row in example["documents"]])
        return batch


class PackedTrainer(SFTTrainer):
    """SFTTrainer that takes data order and checkpoints from this house; loss and loop are TRL's."""

    def __init__(self, spec: Spec, **arguments: Any) -> None:
        self.spec = spec
        self.documents: list[int] = []
        """Row numbers this rank has trained on since the observer last cleared the list."""
        super().__init__(**arguments)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = train_dataset if train_dataset is not None else self.train_dataset
        return DataOrder(len(dataset), self.spec.params.seed, self.spec.steps * self.spec.params.global_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.documents += inputs.pop("documents").tolist()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights are in the engine's shards; here only what names them: the configuration, and that of adapters."""
        model: Any = self.model
        if self.args.should_save and output_dir is not None:
            model.config.save_pretrained(output_dir)
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        Trainer._save_checkpoint(self, model, trial)  # TRL's own adds a model card
        dist.barrier()
        if self.args.should_save:
            run, step = Path(self.spec.run), self.state.global_step
            checkpoint.mark_complete(
                run / checkpoint.folder_name(step),
                step,
                ranks=self.spec.ranks,
                zero=self.spec.zero,
                global_batch=self.spec.params.global_batch,
            )
            checkpoint.rotate(run)
        dist.barrier()


class StopWhenAsked(TrainerCallback):
    """After each step the ranks agree whether any was asked to stop; then all save and stop at the same step."""

    def __init__(self) -> None:
        self.asked = False
        self.stopped = False
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        flag = torch.tensor([int(self.asked)], device=args.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True


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


def prepare(spec: Spec) -> Session:
    """Join the process group, then arguments, then model: in this order, or ranks and batch sizes read as one."""
    torch.set_num_threads(spec.threads)
    if spec.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # The shared-memory op serves inference only; building it would need a compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if spec.cuda else "gloo")
    arguments = _arguments(spec)
    params = spec.params
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32, attn_implementation=attention.implementation())
    packed = load_packed(Path(spec.packed), "train")
    if spec.sequences is not None:
        packed = packed.select(spec.sequences)
    trainer = PackedTrainer(
        spec,
        model=model,
        args=arguments,
        train_dataset=packed,
        processing_class=tokenizer,
        data_collator=PackedCollator(pad_token_id=0, padding_free=True),
        peft_config=_adapters(params.tuning) if isinstance(params.tuning, LoraTuning) else None,
    )
    trainer.remove_callback(PrinterCallback)  # the curve has a line per step and its own progress line
    return Session(spec, trainer, packed)


def load_packed(folder: Path, split: str) -> Any:
    """The sequences of a packed split, mapped into memory, shard after shard."""
    return concatenate_datasets([Dataset.from_file(path) for path in packed_files(folder, split)])


def train(session: Session, observers: Sequence[TrainerCallback] = ()) -> dict[str, Any]:
    """Train to the last step or until asked to stop; return (on every rank) and write (rank 0) the result."""
    spec, trainer, run = session.spec, session.trainer, Path(session.spec.run)
    stop = StopWhenAsked()
    trainer.add_callback(stop)
    for observer in observers:
        trainer.add_callback(observer)
    resumed_from = 0
    if spec.resume_from is not None:
        resumed_from = int(spec.resume_from.rpartition("-")[2])
    if trainer.args.should_save:
        trainer.add_callback(Curve(run, resumed_from))
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(run / spec.resume_from) if spec.resume_from is not None else None)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"outcome": "stopped" if stop.stopped else "finished", "step": trainer.state.global_step}
    if not stop.stopped:
        result |= _summary(session, seconds, resumed_from)
    if trainer.args.should_save:
        write_json(run / RESULT, result)
    return result


def _arguments(spec: Spec) -> SFTConfig:
    params = spec.params
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
        max_grad_norm=params.max_grad_norm,
        optim="adamw_torch_fused" if spec.cuda else "adamw_torch",
        seed=params.seed,
        **precision.trainer_arguments(params.precision),
        gradient_checkpointing=spec.activation_checkpointing,
        save_strategy="steps",
        save_steps=spec.checkpoint_every,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a NaN must be seen, not averaged away
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=spec.cuda,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )


def _adapters(tuning: LoraTuning) -> Any:
    from peft import LoraConfig

    targets: Any = "all-linear" if tuning.target_modules == ["all-linear"] else tuning.target_modules
    return LoraConfig(
        r=tuning.rank, lora_alpha=tuning.alpha, lora_dropout=tuning.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )


def _summary(session: Session, seconds: float, resumed_from: int) -> dict[str, Any]:
    """The figures of a finished run; collective, so every rank calls it."""
    spec, trainer = session.spec, session.trainer
    tokens = trainer._total_train_tokens
    steps = trainer.state.global_step - resumed_from
    per_rank = tokens / seconds / spec.ranks if steps else 0.0
    memory = _gathered(peak_memory_bytes(spec.cuda))
    eval_loss = held_out_loss(session)
    if trainer.args.should_save:
        _save_probe(session)
    elif spec.zero == 3:
        _probe_logits(session)  # every rank takes part in gathering the weights
    curve = read_curve(Path(spec.run))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in session.model.parameters())
    return {
        "steps_run": steps,
        "resumed_from": resumed_from,
        "tokens": tokens,
        "loss_first": curve[0]["loss"] if curve else None,
        "loss_last": _mean([line["loss"] for line in curve[-10:]]),
        "clip_share": _mean([float(line["grad_norm"] > spec.params.max_grad_norm) for line in curve]),
        "eval_loss": eval_loss,
        "tokens_per_second_per_gpu": round(per_rank, 1),
        "mfu": model_flops_utilisation(parameters, per_rank),
        "peak_bytes": memory,
        "seconds": round(seconds, 3),
        "world_size": spec.ranks,
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "python": sys.version.split()[0]},
    }


def held_out_loss(session: Session) -> float | None:
    """Mean negative log-likelihood per supervised token of the validation split (nats); None where it is empty.

    Ranks take every ranks-th sequence; one that has run out repeats its last with weight zero, since under ZeRO-3 all
    must call forward.
    """
    spec, trainer = session.spec, session.trainer
    rows = load_packed(Path(spec.packed), "validation")
    if not len(rows):
        return None
    model, device, collate = session.engine, trainer.args.device, PackedCollator(pad_token_id=0, padding_free=True)
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(rows), spec.ranks):
        mine = start + dist.get_rank()
        batch = collate.torch_call([rows[min(mine, len(rows) - 1)]])
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items() if k != "documents"}
        with torch.no_grad():
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        if mine < len(rows):
            total += torch.stack([-outputs.log_probs.double().sum(), outputs.label_mask.double().sum()])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _probe_logits(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([session.packed[0]["input_ids"][:PROBE_TOKENS]], device=session.trainer.args.device)
    model = session.engine
    model.eval()
    with torch.no_grad():
        return ids, model(input_ids=ids, use_cache=False).logits.float()


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


if __name__ == "__main__":
    train(prepare(load_spec(Path(sys.argv[1]))))
    close()
