"""The training benchmark's part on every rank: the real trainer on random weights, timed.

Contract: runs `sft.prepare` with a loader of its own and the trainer's own loop; stops without saving. Rank 0 writes
`RUN/result.json`.

Command: torchrun -m pipeline.planning.training_bench_rank SPEC.json WARM TIMED (`ladder bench train` starts it so).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from pipeline.artifact import write_json
from pipeline.training import precision, sft
from pipeline.training.curve import read_curve
from pipeline.training.spec import Spec, load_spec
from pipeline.training.telemetry import peak_flops, peak_memory_bytes
from pipeline.training.trainer import AfterEachStep


def random_model(spec: Spec, attention: str) -> Any:
    """A model of the spec's shape with random weights, drawn on the device."""
    config = AutoConfig.from_pretrained(spec.model)
    dtype = getattr(torch, precision.load_dtype(spec.params.precision))
    torch.manual_seed(spec.params.seed)
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if spec.cuda else torch.device("cpu")
    with place:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


class Clock(TrainerCallback):
    """Times `timed` steps after `warm` ones, then profiles a forward and backward pass for what NCCL does, then ends the run
    without a checkpoint."""

    def __init__(self, session: sft.Session, warm: int, timed: int) -> None:
        self.session, self.warm, self.timed = session, warm, timed
        self.start = self.seconds = 0.0
        self.counted = (0, 0)
        self.communication: float | None = None
        self._profile: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, step = self.session.trainer, state.global_step
        if step == self.warm:
            self._wait()
            self.start, self.counted = time.perf_counter(), (trainer.tokens, trainer.attended)
        elif step == self.warm + self.timed:
            self._wait()
            self.seconds = time.perf_counter() - self.start
            self.counted = (trainer.tokens - self.counted[0], trainer.attended - self.counted[1])
            if self.session.spec.cuda and self.session.spec.ranks > 1:
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.start()
                self.start = time.perf_counter()
            else:
                control.should_training_stop, control.should_save = True, False
        elif step == self.warm + self.timed + 1:
            self._end_profile()
            control.should_training_stop, control.should_save = True, False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_profile()

    def _end_profile(self) -> None:
        """After the first micro-batch: reading a profile takes seconds for each."""
        if self._profile is None or self.communication is not None:
            return
        self._wait()
        seconds = time.perf_counter() - self.start
        self._profile.stop()
        busy = sum(e.self_device_time_total for e in self._profile.key_averages() if e.key.startswith("nccl"))
        self.communication = busy / 1e6 / seconds

    def _wait(self) -> None:
        if self.session.spec.cuda:
            torch.cuda.synchronize()
        dist.barrier()


def main(spec: Spec, warm: int, timed: int) -> None:
    session = sft.prepare(spec, random_model)
    trainer = session.trainer
    clock = Clock(session, warm, timed)
    trainer.add_callback(AfterEachStep(trainer))
    trainer.add_callback(clock)
    trainer.curve.begin(0)
    trainer.train()
    trainer.curve.report()
    counted = torch.tensor([*clock.counted], dtype=torch.float64, device=trainer.args.device)
    dist.all_reduce(counted)
    tokens, attended = counted.tolist()
    held = torch.tensor(
        [peak_memory_bytes(spec.cuda), torch.cuda.max_memory_reserved() if spec.cuda else 0],
        dtype=torch.float64,
        device=trainer.args.device,
    )
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    speed = tokens / clock.seconds / spec.ranks
    peak = peak_flops()
    if trainer.args.should_save:
        result = {
            "outcome": "finished",
            "tokens_per_second": speed,
            "mfu": speed * spec.shape.flops_per_token(attended / tokens) / peak if peak else None,
            "seconds_per_step": clock.seconds / timed,
            "peak_gib": held[0].item() / 2**30,
            "reserved_gib": held[1].item() / 2**30,
            "communication_share": clock.communication,
            "loss": read_curve(Path(spec.run))[-1]["loss"],
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "deepspeed": deepspeed.__version__,
                "gpu": torch.cuda.get_device_name() if spec.cuda else "none",
            },
        }
        write_json(Path(spec.run) / sft.RESULT, result)
    sft.close()


if __name__ == "__main__":
    sft.guarded(load_spec(Path(sys.argv[1])), lambda spec: main(spec, int(sys.argv[2]), int(sys.argv[3])))
