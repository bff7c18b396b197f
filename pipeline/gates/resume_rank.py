"""The resume gate's part on every rank: train, note each step, and be killed where told.

Contract: runs `sft.train` unchanged. After each step every rank appends to `RUN/steps-RANK.jsonl`: step, rows seen.
With KILL_AT, every rank sends itself SIGKILL at the end of that step, before anything more is saved, as an
out-of-memory killer or a lost node would.

Command: torchrun -m pipeline.gates.resume_rank SPEC.json [KILL_AT] (the resume stage starts it so).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from pipeline.training.sft import Session, close, guarded, prepare, train
from pipeline.training.spec import Spec, load_spec


class Steps(TrainerCallback):
    """Appends what this rank saw in each step, and kills the rank after step `kill_at`."""

    def __init__(self, session: Session, kill_at: int | None) -> None:
        self.session, self.kill_at = session, kill_at
        session.trainer.documents = []
        self.path = Path(session.spec.run) / f"steps-{dist.get_rank()}.jsonl"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.session.trainer
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "documents": trainer.documents or []}) + "\n")
        trainer.documents = []
        if state.global_step == self.kill_at:
            dist.barrier()  # all ranks have noted the step; none has begun the next
            os.kill(os.getpid(), signal.SIGKILL)


def main(spec: Spec, kill_at: int | None) -> None:
    session = prepare(spec)
    train(session, [Steps(session, kill_at)])
    close()


if __name__ == "__main__":
    kill_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
    guarded(load_spec(Path(sys.argv[1])), lambda spec: main(spec, kill_at))
