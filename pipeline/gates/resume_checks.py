"""What the resume gate claims: a killed and resumed run is the straight run.

Contract: `step_checks` compares what the ranks noted and the curves, step by step; `export_checks` compares the two
exports and the straight run's logits. Nothing here imports torch at module level.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.params import ResumeParams
from pipeline.gates.verdict import Check, at_least, at_most

NOT_RESTORED = "weights, data or random state was not restored"


def documents_by_step(run: Path, ranks: int) -> dict[int, list[list[int]]]:
    """Rows each rank saw in each step; a step that was redone after a kill counts with what was seen last."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        path = run / f"steps-{rank}.jsonl"
        for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            line = json.loads(text)
            found.setdefault(line["step"], [[] for _ in range(ranks)])[rank] = line["documents"]
    return found


def step_checks(
    params: ResumeParams,
    straight: Mapping[int, list[list[int]]],
    resumed: Mapping[int, list[list[int]]],
    straight_curve: Sequence[Mapping[str, Any]],
    resumed_curve: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
) -> list[Check]:
    """Compare steps after the kill: which rows, which learning rate, which loss and gradient norm."""
    after = range(params.kill_after + 1, params.steps + 1)
    curves = [{line["step"]: line for line in curve} for curve in (straight_curve, resumed_curve)]
    wrong_ids = sum(straight.get(s) != resumed.get(s) for s in after)
    return [
        at_most(
            "resumed_at",
            abs(result["resumed_from"] - params.kill_after),
            0,
            "the resumed run did not begin at the last complete checkpoint",
        ),
        at_least("steps_done", result["step"], params.steps, "the resumed run ended early"),
        at_most("data_order", wrong_ids, 0, "steps after the resume in which a rank saw other rows than in the straight run"),
        at_most("learning_rate", _gap(curves, after, "learning_rate"), 0, "the schedule was not restored"),
        at_most("loss", _gap(curves, after, "loss"), params.max_loss_gap, f"loss after the resume differs: {NOT_RESTORED}"),
        at_most(
            "gradient_norm",
            _gap(curves, after, "grad_norm"),
            params.max_loss_gap,
            f"gradient norm after the resume differs: {NOT_RESTORED}",
        ),
    ]


def export_checks(params: ResumeParams, straight: Path, resumed: Path, probe: Path) -> list[Check]:
    """Compare two exported model folders tensor by tensor, and the first with the logits the trained model left."""
    from pipeline.exporting.verify import logit_gap, weight_gap

    return [
        at_most(
            "weights",
            weight_gap(straight, resumed),
            params.max_weight_gap,
            "exported weights differ between straight and resumed run: optimizer state was not restored",
        ),
        at_most(
            "export_logits",
            logit_gap(straight, probe),
            params.max_logit_gap,
            "the exported model answers otherwise than the trained one: a tensor is lost, untied or wrongly converted",
        ),
    ]


def _gap(curves: Sequence[Mapping[int, Mapping[str, Any]]], steps: range, field: str) -> float:
    pairs = [tuple(curve.get(step, {}).get(field, math.nan) for curve in curves) for step in steps]
    return max((abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs), default=math.inf)
