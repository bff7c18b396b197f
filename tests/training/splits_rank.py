"""One rank that trains many specs one after the other: a launch costs ten seconds of imports, a tiny run half of one.

Reads {name: spec} from a file; leaves OUT/NAME/ with the curve, the result, the whole weights (gathered from their shards)
and, for each rank, the documents of each step.

Command: torchrun --nproc_per_node RANKS -m tests.training.splits_rank CASES.json OUT (`tiny.train_all` starts it so).
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import TrainerCallback

from pipeline.artifact import write_json
from pipeline.training import sft
from pipeline.training.curve import CURVE
from pipeline.training.spec import Spec


class Seen(TrainerCallback):
    """Documents this rank has trained on, step by step."""

    def __init__(self, session: sft.Session) -> None:
        self._session = session
        session.trainer.documents = []
        self.steps: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self._session.trainer.documents or [])
        self._session.trainer.documents = []


def whole_weights(session: sft.Session) -> dict[str, torch.Tensor]:
    """Every parameter; collective under ZeRO-3."""
    named = dict(session.engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=session.spec.profile.zero == 3):
        return {name: parameter.detach().clone().contiguous() for name, parameter in named.items()}


def train_one(spec: Spec, out: Path) -> None:
    session = sft.prepare(spec)
    seen = Seen(session)
    sft.train(session, [seen])
    weights = whole_weights(session)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"seen-{dist.get_rank()}.json", {"steps": seen.steps})
    if dist.get_rank() == 0:
        save_file(weights, out / "weights.safetensors")
        shutil.copy(Path(spec.run) / CURVE, out)
        shutil.copy(Path(spec.run) / sft.RESULT, out)
    dist.barrier()


if __name__ == "__main__":
    gc.freeze()  # the trainer collects garbage three times a run; 0.5 s each over all that was imported
    for name, stated in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        print(f"== {name}", flush=True)
        train_one(Spec.model_validate(stated), Path(sys.argv[2]) / name)
    sft.close()
