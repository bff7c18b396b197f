"""TRL's SFTTrainer with this house's data order, loss, curve and checkpoints; the loop is theirs.

Contract: a step sees the global batch that `DataOrder` says, whatever the ranks. The loss is the mean over the supervised
tokens of the whole global batch. Nothing waits for the GPU between two reports (about every two seconds): losses and norms
stay on the device until then. After each step the ranks agree, over the CPU, whether any was asked to stop; then all save
and stop at the same step.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from pipeline.training import checkpoint, head
from pipeline.training.batching import DataOrder, GroupBatches
from pipeline.training.clipping import FixedLimit, Limit, keep_norm, set_limit
from pipeline.training.curve import CURVE, read_curve
from pipeline.training.sequence import group_of
from pipeline.training.spec import Spec

REPORT_SECONDS = 2.0
FIRST_STEPS = 3
"""Reported one by one: whoever has just started a run looks whether it lives."""
LOADER_PROCESSES = 2
"""Per rank, on GPUs: one batch is made in 2-5 ms and a forward pass takes 200, so one would do and two never lack."""


class PackedTrainer(SFTTrainer):
    """See the module. `limit`: of the gradient's norm."""

    model_accepts_loss_kwargs = True  # the loss is scaled for the whole global batch; the loop must not do it again

    def __init__(self, spec: Spec, limit: Limit, **arguments: Any) -> None:
        self.spec, self.limit = spec, limit
        self.documents: list[int] | None = None
        """Row numbers this rank has trained on since an observer put a list here; None where nobody asks."""
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = True  # the constructor works it out anew from the model
        model: Any = self.model
        head.install(model.get_base_model() if hasattr(model, "peft_config") else model)
        self.step_loss = torch.zeros((), device=self.args.device)
        self.tokens = self.attended = 0
        """What this rank has computed, counted as in `collate.py`."""
        self.curve = CurveWriter(self)

    def get_train_dataloader(self) -> DataLoader[Any]:
        spec, rows = self.spec, self.train_dataset
        order = DataOrder(len(rows), spec.params.seed, spec.steps * spec.params.global_batch)  # pyright: ignore[reportArgumentType]
        group, _ = group_of(dist.get_rank(), spec.profile.sequence_parallel)
        batches = GroupBatches(order, spec.micro_batch, group, spec.ranks // spec.profile.sequence_parallel)
        return DataLoader(
            rows.with_format("numpy"),  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportOptionalMemberAccess]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=LOADER_PROCESSES if spec.cuda else 0,
            pin_memory=spec.cuda,
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        count = torch.tensor(sum(batch["supervised"].numel() for batch in batch_samples), device=device)
        dist.all_reduce(count)
        return count

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return to_device(inputs, self.args.device, compiled=self.spec.profile.kernels == "compiled")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        seen = inputs.pop("documents")
        if self.documents is not None:
            self.documents += seen
        self.tokens += inputs.pop("tokens")
        self.attended += inputs.pop("attended")
        # The engine takes the mean of the ranks' gradients; a batch without a supervised token gives zero, not 0 / 0.
        return model(**inputs) * (self.spec.ranks / num_items_in_batch.clamp(min=1))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.step_loss += loss
        return loss

    # DeepSpeed's engine has stepped by the time the loop asks for a norm; asking would wait for the GPU.
    def _clip_grad_norm(self, model: Any) -> None:
        return None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights are in the engine's shards; here only what names them: the configuration, and that of adapters."""
        model: Any = self.model
        if self.args.should_save and output_dir is not None:
            model.config.save_pretrained(output_dir)
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.curve.report()  # a checkpoint's steps are in the curve
        Trainer._save_checkpoint(self, model, trial)  # TRL's own adds a model card
        dist.barrier()
        if self.args.should_save:
            run, step = Path(self.spec.run), self.state.global_step
            folder = run / checkpoint.folder_name(step)
            self.limit.save(folder)
            checkpoint.mark_complete(
                folder,
                step,
                ranks=self.spec.ranks,
                zero=self.spec.profile.zero,
                global_batch=self.spec.params.global_batch,
            )
            checkpoint.rotate(run)
        dist.barrier()


def to_device(inputs: dict[str, Any], device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """A batch on the device, without waiting for the copy: the loader's memory is pinned."""
    moved = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in inputs.items()}
    if compiled:
        torch._dynamo.mark_dynamic(moved["cu_seq_lens_q"], 0)  # the number of documents is all that changes
    return moved


class CurveWriter:
    """The steps since the last report, on the device; and the file they go to. `report` is collective."""

    def __init__(self, trainer: PackedTrainer) -> None:
        self._trainer = trainer
        self._path = Path(trainer.spec.run) / CURVE
        self._waiting: list[tuple[int, float, float]] = []
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._start = self.last = time.perf_counter()
        self._first = 0
        self.steps = 0
        """Reported since the ranks began."""

    def begin(self, from_step: int) -> None:
        """Drop lines past the checkpoint, so that a step stands there once, and start the clock."""
        self._first = from_step
        self._start = self.last = time.perf_counter()
        if self._trainer.args.should_save:
            kept = [line for line in read_curve(self._path.parent) if line["step"] <= from_step]
            self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def note(self, step: int, norm: Any, learning_rate: float, limit: float) -> None:
        """A finished step; takes the trainer's sum of its losses."""
        trainer = self._trainer
        self._waiting.append((step, learning_rate, limit))
        self._losses.append(trainer.step_loss.detach().clone())
        self._norms.append(torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32, device=trainer.args.device))
        trainer.step_loss.zero_()

    def report(self) -> None:
        """Write what waits: one line per step with step, loss (mean over ranks), grad_norm (before clipping), learning_rate,
        limit, seconds since the ranks began."""
        if not self._waiting:
            return
        trainer = self._trainer
        losses = torch.stack(self._losses)
        dist.all_reduce(losses)
        seconds = time.perf_counter() - self._start
        values = torch.stack([losses / trainer.spec.ranks, torch.stack(self._norms)]).tolist()
        self.last = time.perf_counter()
        if trainer.args.should_save:
            lines = [
                {
                    "step": step,
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "limit": limit,
                    "seconds": round(seconds, 3),
                }
                for (step, rate, limit), loss, norm in zip(self._waiting, *values, strict=True)
            ]
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self._tell(lines[-1], seconds)
        self.steps += len(self._waiting)
        self._waiting, self._losses, self._norms = [], [], []

    def _tell(self, line: dict[str, Any], seconds: float) -> None:
        last, done = self._trainer.spec.steps, line["step"] - self._first
        left = (last - line["step"]) * seconds / done
        print(
            f"  step {line['step']}/{last}  loss {line['loss']:.4f}  {done / seconds:.1f} steps/s  {left:.0f} s left",
            file=sys.stderr,
        )


class AfterEachStep(TrainerCallback):
    """Notes the step, sets the limit of the next, reports when it is time, and stops when a rank was asked to."""

    def __init__(self, trainer: PackedTrainer) -> None:
        self._trainer = trainer
        self._asked = False
        self.stopped = False
        # Over the CPU: a flag on the GPU would have to be waited for, and with it all that is queued there.
        self._agreement = dist.new_group(backend="gloo")
        self._rate = 0.0
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine: Any = self._trainer.model_wrapped
        set_limit(engine, self._trainer.limit.limit)
        if self._trainer.spec.profile.zero == 0:
            keep_norm(engine)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rate = float(self._trainer._get_learning_rate())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        engine: Any = trainer.model_wrapped
        norm, limit = engine.get_global_grad_norm(), trainer.limit
        trainer.curve.note(state.global_step, norm, self._rate, limit.limit)
        if not isinstance(limit, FixedLimit):
            limit.observe(float(norm))  # waits for the step: the next one's limit hangs on it
            set_limit(engine, limit.limit)
        due = trainer.curve.steps < FIRST_STEPS or time.perf_counter() - trainer.curve.last > REPORT_SECONDS
        flags = torch.tensor([int(self._asked), int(due)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._agreement)
        asked, due = flags.tolist()
        if due or asked or state.global_step == state.max_steps:
            trainer.curve.report()
        if asked and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
