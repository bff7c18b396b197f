"""Held-out loss and generation, base and tuned model side by side.

Contract: the same held-out rows for both, as packing left them: of a row that was cut or split the loss counts what training
would see, and it is asked only if its first answer stands there to the end. exact_match: share of answers equal to the
reference, outer white space apart. stop_rate: share that ended with the stop token. `answers` holds every prompt, reference
and both answers, so that a figure can be read.

Command: python -m stages.evaluate --formatted data/formatted --packed data/packed --model models/base
         --exported models/export --answers metrics/answers.jsonl --metrics metrics/evaluate.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.errors import DataError
from pipeline.config.params import EvaluateParams
from pipeline.dataset.manifest import read_packed_of
from pipeline.dataset.masking import PartTokenizer, load_tokenizer
from pipeline.evaluation import generate
from pipeline.evaluation.held_out import HeldOut, read_held_out
from pipeline.stage import run_stage


@dataclass(frozen=True)
class Scores:
    loss: float
    exact_match: float | None
    """None, as is stop_rate, where no row can be asked: under format.supervise all_text rows have no prompt."""
    stop_rate: float | None


@dataclass(frozen=True)
class EvaluateMetrics:
    """rows: those the loss is of; rows_asked: those of them that are answered and compared."""

    base: Scores
    tuned: Scores
    rows: int
    rows_asked: int


def evaluate(
    evaluate: EvaluateParams, *, formatted: Path, packed: Path, model: Path, exported: Path, answers: Path
) -> EvaluateMetrics:
    """Score both models on the first held-out rows."""
    facts = read_packed_of(packed, formatted, model)
    rows = read_held_out(packed, formatted, evaluate.rows, facts.stop_token_id)
    if not rows:
        raise DataError(f"{packed}: no held-out rows; raise format.validation_share or add rows")
    tokenizer = load_tokenizer(model)
    by_model = {
        name: _scored(folder, rows, tokenizer, facts.stop_token, facts.stop_token_id, evaluate)
        for name, folder in (("base", model), ("tuned", exported))
    }
    asked = _asked(rows)
    with answers.open("w", encoding="utf-8") as file:
        for index, (prompt, answer) in enumerate(asked):
            line = {"prompt": prompt, "reference": _reference(answer, facts.stop_token)}
            line |= {name: given[index].text for name, (_, given) in by_model.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return EvaluateMetrics(base=by_model["base"][0], tuned=by_model["tuned"][0], rows=len(rows), rows_asked=len(asked))


def _scored(
    folder: Path, rows: Sequence[HeldOut], tokenizer: PartTokenizer, stop_token: str, stop: int, params: EvaluateParams
) -> tuple[Scores, list[generate.Answer]]:
    model = generate.load(folder)
    held_out_loss = round(generate.loss(model, [document for row in rows for document in row.documents]), 4)
    asked = _asked(rows)
    if not asked:
        return Scores(held_out_loss, None, None), []
    prompts = [prompt for prompt, _ in asked]
    given = generate.answers(model, prompts, tokenizer, stop, max_new_tokens=params.max_new_tokens, batch=params.batch)
    references = [_reference(answer, stop_token) for _, answer in asked]
    exact = sum(a.stopped and a.text.strip() == reference for a, reference in zip(given, references, strict=True))
    scores = Scores(
        loss=held_out_loss,
        exact_match=round(exact / len(asked), 4),
        stop_rate=round(sum(a.stopped for a in given) / len(asked), 4),
    )
    return scores, given


def _asked(rows: Sequence[HeldOut]) -> list[tuple[str, str]]:
    return [row.asked for row in rows if row.asked is not None]


def _reference(answer: str, stop_token: str) -> str:
    return answer.removesuffix(stop_token).strip()


if __name__ == "__main__":
    run_stage(evaluate)
