"""Planted faults: real mistakes, put in on purpose to see whether a gate catches them.

Contract: `arm(name)` makes this process patch one library function as soon as its module is imported. The product never
calls it; a test puts a `sitecustomize.py` that does on the PYTHONPATH of a stage, so that every rank it starts is faulty as well.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """patch: changes the freshly imported `module`. caught_by: gate and check that must fail."""

    module: str
    patch: Callable[[Any], None]
    caught_by: tuple[str, str]
    what: str


def arm(name: str) -> None:
    """Plant a fault in this process."""
    fault = FAULTS[name]
    sys.meta_path.insert(0, _PatchingFinder(fault))


def _on_a_rank() -> bool:
    """Ranks are given a spec; the stage that judges them is not."""
    return len(sys.argv) > 1 and sys.argv[1].endswith(".json")


def _prompt_trained(module: Any) -> None:
    collate = module.PackedCollator.__call__

    def faulty(self: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return collate(self, [{**row, "labels": row["input_ids"]} for row in rows])

    module.PackedCollator.__call__ = faulty


def _documents_leak(module: Any) -> None:
    collate = module.PackedCollator.__call__

    def faulty(self: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(self, rows)
        length = batch["position_ids"].shape[1]
        one = batch["cu_seq_lens_q"].new_tensor([0, length])
        positions = batch["position_ids"].new_tensor([list(range(length))])
        return {**batch, "position_ids": positions, "cu_seq_lens_q": one, "max_length_q": length}

    module.PackedCollator.__call__ = faulty


def _gradients_not_summed(module: Any) -> None:
    module.DeepSpeedZeroOptimizer.allreduce_bucket = lambda self, bucket, *_, **__: self.flatten(bucket)


def _order_reset(module: Any) -> None:
    iterate = module.DataOrder.__iter__

    def faulty(self: Any) -> Any:
        self._seed += _on_a_rank() and json.loads(Path(sys.argv[1]).read_text())["resume_from"] is not None
        return iterate(self)

    module.DataOrder.__iter__ = faulty


def _rank_repeated(module: Any) -> None:
    iterate = module.DataOrder.__iter__

    def faulty(self: Any) -> Any:
        order = list(iterate(self))
        return iter(order[i - i % 2] for i in range(len(order))) if _on_a_rank() else iter(order)

    module.DataOrder.__iter__ = faulty


def _head_untied(module: Any) -> None:
    build = module._model_of

    def faulty(config: Any, state: Any) -> Any:
        model = build(config, state)
        head = model.get_output_embeddings()
        head.weight = type(head.weight)(head.weight.detach().roll(1, dims=0).clone())
        model.config.tie_word_embeddings = False
        return model

    module._model_of = faulty


FAULTS = {
    "prompt_trained": Fault(
        "pipeline.training.collate",
        _prompt_trained,
        ("smoke", "loss_reference"),
        "labels cover the prompt: the loss mask is lost",
    ),
    "documents_leak": Fault(
        "pipeline.training.collate",
        _documents_leak,
        ("smoke", "loss_reference"),
        "positions run through a pack, so documents see each other",
    ),
    "rank_repeated": Fault(
        "pipeline.training.batching", _rank_repeated, ("smoke", "data_once"), "every second sequence is the one before again"
    ),
    "gradients_not_summed": Fault(
        "deepspeed.runtime.zero.stage_1_and_2",
        _gradients_not_summed,
        ("smoke", "gradient_reference"),
        "each rank steps with its own gradient",
    ),
    "order_reset": Fault(
        "pipeline.training.batching", _order_reset, ("resume", "data_order"), "a resumed run shuffles with another seed"
    ),
    "head_untied": Fault(
        "pipeline.exporting.consolidate",
        _head_untied,
        ("resume", "export_logits"),
        "the exported head is not the embedding it is tied to",
    ),
}


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the fault's module as usual, and patches it after it has run."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._fault.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._fault.patch)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[Any], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
