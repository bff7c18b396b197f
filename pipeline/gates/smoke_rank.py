"""The smoke gate's part on every rank: train the samples, and hold the engine against one process.

Contract: runs `sft.train` unchanged, and beside it (a) takes the gradient the engine is about to apply in its first
step, (b) computes the same batch's loss and gradient on rank 0 from the formatted text, document by document, in fp32,
without packing, engine or process group, (c) notes which documents each rank saw, (d) compares the ranks' weights at
the end. Rank 0 writes `RUN/smoke.json`.

Command: torchrun -m pipeline.gates.smoke_rank SPEC.json FORMATTED (the smoke stage starts it so).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from peft import get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from pipeline.artifact import write_json
from pipeline.dataset.fragments import fragment
from pipeline.dataset.masking import IGNORED, load_tokenizer, tokenise, truncated
from pipeline.training.batching import DataOrder
from pipeline.training.sft import Session, close, guarded, prepare, train
from pipeline.training.spec import Spec, load_spec
from pipeline.training.telemetry import forget_peak_memory

REPORT = "smoke.json"


class FirstGradient(TrainerCallback):
    """Copies the gradient that the engine holds when it is about to step for the first time: summed over ranks, not yet
    clipped."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gradient: dict[str, torch.Tensor] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self.session.engine
        step = engine.step

        def step_once(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in _trainable(engine.module):
                gradient = _present(safe_get_full_grad(parameter))  # collective: every rank asks, rank 0 keeps
                if dist.get_rank() == 0:
                    self.gradient[name] = gradient.detach().float().cpu().clone()
            engine.step = step
            return step(*args, **kwargs)

        engine.step = step_once


class SeenDocuments(TrainerCallback):
    """Row numbers of the documents this rank trained on, step by step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.trainer.documents = []
        self.steps: list[list[int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.session.trainer
        self.steps.append(trainer.documents or [])
        trainer.documents = []


def reference(session: Session, adapters: dict[str, torch.Tensor], formatted: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss (mean over supervised tokens) and gradient of the first global batch, from text, in one process."""
    spec = session.spec
    device = session.trainer.args.device
    plugin: Any = session.trainer.accelerator.state.deepspeed_plugin
    unset_hf_deepspeed_config()  # under ZeRO-3 transformers would partition this model too
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32, attn_implementation="eager")
    model.to(device)
    set_hf_deepspeed_config(plugin.hf_ds_config)
    if adapters:
        model = get_peft_model(model, session.model.peft_config["default"])
        for name, parameter in _trainable(model):
            parameter.data.copy_(adapters[name])
    model.eval()
    batch = DataOrder(len(session.packed), spec.params.seed, spec.params.global_batch)
    sequences = [session.packed[sequence] for sequence in batch]
    rows, first_parts, lengths = (
        [value for sequence in sequences for value in sequence[name]] for name in ("documents", "first_parts", "seq_lengths")
    )
    texts = [
        fragment(row["parts"], first, len(row["parts"]), row["head"], row["gap"])
        for row, first in zip(_rows(formatted, rows), first_parts, strict=True)
    ]
    tokenised = tokenise(texts, load_tokenizer(Path(spec.model)))
    documents = [truncated(document, length) for document, length in zip(tokenised, lengths, strict=True)]
    supervised = sum(d.supervised for d in documents)
    total = 0.0
    for document in documents:
        ids = torch.tensor([document.input_ids], device=device)
        labels = torch.tensor(document.labels[1:], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / supervised
        loss.backward()
        total += float(loss.detach())
    return total, {name: _present(p.grad).float().cpu() for name, p in _trainable(model)}


def gradient_error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two gradients over all parameters; infinite where names differ."""
    if ours.keys() != expected.keys():
        return float("inf")
    difference = sum(float((ours[n] - expected[n]).double().square().sum()) for n in expected)
    norm = sum(float(g.double().square().sum()) for g in expected.values())
    return (difference / norm) ** 0.5 if norm else float("inf")


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a trainable parameter without a gradient"
    return tensor


def _trainable(model: Any) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def _rows(formatted: Path, rows: list[int]) -> list[dict[str, Any]]:
    with pa.memory_map(str(formatted / "train.arrow")) as file:
        return pa.ipc.open_stream(file).read_all().select(["parts", "head", "gap"]).take(pa.array(rows)).to_pylist()


def _adapters(session: Session) -> dict[str, torch.Tensor]:
    """The adapters' initial weights, which only the trained model has; empty for full tuning."""
    if not hasattr(session.model, "peft_config"):
        return {}
    return {n: p.detach().float().cpu().clone() for n, p in _trainable(session.model)}


def _weight_gap(session: Session) -> float:
    """Largest difference of any weight between two ranks, of the copies they compute with (ZeRO-3: of what gathering
    gives them)."""
    gap = 0.0
    for _, parameter in _trainable(session.model):
        weight = _present(safe_get_full_fp32_param(parameter)) if session.spec.profile.zero == 3 else parameter.data
        low, high = weight.float().clone(), weight.float().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        gap = max(gap, float((high - low).max()))
    return gap


def main(spec: Spec, formatted: Path) -> None:
    session = prepare(spec)
    first, seen = FirstGradient(session), SeenDocuments(session)
    loss, expected = reference(session, _adapters(session), formatted) if dist.get_rank() == 0 else (0.0, {})
    forget_peak_memory(session.spec.cuda)  # rank 0's second model is not what training needs
    dist.barrier()
    train(session, [first, seen])
    documents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(documents, seen.steps)
    gap = _weight_gap(session)
    if dist.get_rank() == 0:
        report = {
            "reference_loss": loss,
            "gradient_error": gradient_error(first.gradient, expected),
            "documents": documents,
            "weight_gap": gap,
        }
        write_json(Path(session.spec.run) / REPORT, {k: v if v != float("inf") else None for k, v in report.items()})
    close()


if __name__ == "__main__":
    guarded(load_spec(Path(sys.argv[1])), lambda spec: main(spec, Path(sys.argv[2])))
