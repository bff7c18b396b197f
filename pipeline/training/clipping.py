"""The limit on the gradient's norm, step by step: fixed, or from the norms the run has shown.

Contract: clipping itself is the engine's, which knows the norm of a partitioned gradient; `set_limit` tells it the limit of
the next step, on every rank the same. An `AdaptiveLimit` is a pure function of the norms so far; its state is a few numbers
that travel with a checkpoint, so a resumed run clips as the straight one would.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from pipeline.artifact import read_json, write_json
from pipeline.config.params import AdaptiveClipping, FixedClipping

STATE = "clipping.json"


class FixedLimit:
    """One limit for all steps."""

    def __init__(self, params: FixedClipping) -> None:
        self.limit = params.max_norm

    def observe(self, norm: float) -> None:
        """Nothing to learn."""

    def save(self, folder: Path) -> None:
        """Nothing to keep."""

    def load(self, folder: Path) -> None:
        """Nothing was kept."""


class AdaptiveLimit:
    """exp(mean + deviations x standard deviation) of the logarithms of the norms, both as exponential moving averages with
    weight 2 / (window + 1); logarithms, since norms spread by factors. A norm above the limit counts as the limit, as in ZClip
    (arXiv:2504.02507): a spike must not raise the limit for the next one. Norms that are not finite, or zero, are left out."""

    def __init__(self, params: AdaptiveClipping) -> None:
        self._params = params
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    @property
    def limit(self) -> float:
        """Of the next step."""
        if self._seen < self._params.window:
            return self._params.max_norm
        return min(self._params.max_norm, math.exp(self._mean + self._params.deviations * math.sqrt(self._variance)))

    def observe(self, norm: float) -> None:
        """Take in the norm of a step, before clipping."""
        if not (math.isfinite(norm) and norm > 0):
            return
        value = math.log(min(norm, self.limit))
        weight = max(2 / (self._params.window + 1), 1 / (self._seen + 1))  # a plain mean while the window fills
        gap = value - self._mean
        self._mean += weight * gap
        self._variance = (1 - weight) * (self._variance + weight * gap * gap)
        self._seen += 1

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder; rank 0 does."""
        write_json(folder / STATE, {"seen": self._seen, "mean": self._mean, "variance": self._variance})

    def load(self, folder: Path) -> None:
        """Take the state up from a checkpoint's folder; ModelError if it holds none."""
        state: dict[str, Any] = read_json(folder / STATE, "the state of adaptive clipping")
        self._seen, self._mean, self._variance = state["seen"], state["mean"], state["variance"]


Limit = FixedLimit | AdaptiveLimit


def limit_of(params: FixedClipping | AdaptiveClipping) -> Limit:
    return FixedLimit(params) if isinstance(params, FixedClipping) else AdaptiveLimit(params)


def set_limit(engine: Any, limit: float) -> None:
    """Have DeepSpeed's engine clip its next step at `limit`: ZeRO's optimizers keep their own copy, without ZeRO the engine
    reads its configuration."""
    engine._config.gradient_clipping = limit
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = limit


def keep_norm(engine: Any) -> None:
    """Without ZeRO the engine clips and forgets the norm; have it remember."""

    def clip() -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())

    engine.clip_fp32_gradients = clip
