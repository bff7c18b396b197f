"""Held-out loss and generation, base and tuned model side by side.

Contract: the same held-out rows for both. exact_match: share of answers equal to the reference, outer white space
apart. stop_rate: share that ended with the stop token. `answers` holds every prompt, reference and both answers, so
that a figure can be read.

Command: python -m stages.evaluate --formatted data/formatted --packed data/packed --model models/base
         --exported models/export --answers metrics/answers.jsonl --metrics metrics/evaluate.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipeline.config.errors import DataError
from pipeline.config.params import EvaluateParams
from pipeline.dataset.manifest import packed_files, read_packed
from pipeline.dataset.masking import PartTokenizer, load_tokenizer
from pipeline.evaluation import generate
from pipeline.stage import run_stage


@dataclass(frozen=True)
class Scores:
    loss: float
    exact_match: float | None
    """None, as is stop_rate, where rows have no prompt (format.supervise: all_text)."""
    stop_rate: float | None


@dataclass(frozen=True)
class EvaluateMetrics:
    base: Scores
    tuned: Scores
    rows: int


def evaluate(
    evaluate: EvaluateParams, *, formatted: Path, packed: Path, model: Path, exported: Path, answers: Path
) -> EvaluateMetrics:
    """Score both models on the first held-out rows."""
    facts = read_packed(packed, model)
    rows = _held_out(formatted, packed, evaluate.rows)
    if not rows:
        raise DataError(f"{packed}: no held-out rows; raise format.validation_share or add rows")
    tokenizer = load_tokenizer(model)
    by_model = {
        name: _scored(folder, rows, tokenizer, facts.stop_token, facts.stop_token_id, evaluate)
        for name, folder in (("base", model), ("tuned", exported))
    }
    with answers.open("w", encoding="utf-8") as file:
        for index, parts in enumerate(rows):
            line = {"prompt": parts[0], "reference": _reference(parts, facts.stop_token)}
            line |= {name: given[index].text for name, (_, given) in by_model.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return EvaluateMetrics(base=by_model["base"][0], tuned=by_model["tuned"][0], rows=len(rows))


def _scored(
    folder: Path, rows: Sequence[Sequence[str]], tokenizer: PartTokenizer, stop_token: str, stop: int, params: EvaluateParams
) -> tuple[Scores, list[generate.Answer]]:
    model = generate.load(folder)
    held_out_loss = round(generate.loss(model, rows, tokenizer), 4)
    if not all(parts[0] for parts in rows):
        return Scores(held_out_loss, None, None), [generate.Answer("", stopped=False) for _ in rows]
    given = generate.answers(
        model, [parts[0] for parts in rows], tokenizer, stop, max_new_tokens=params.max_new_tokens, batch=params.batch
    )
    exact = sum(a.stopped and a.text.strip() == _reference(parts, stop_token) for a, parts in zip(given, rows, strict=True))
    scores = Scores(
        loss=held_out_loss,
        exact_match=round(exact / len(rows), 4),
        stop_rate=round(sum(a.stopped for a in given) / len(rows), 4),
    )
    return scores, given


def _held_out(formatted: Path, packed: Path, limit: int) -> list[list[str]]:
    """Parts of the first held-out rows that packing kept: those the models were declared long enough for."""
    found: set[int] = set()
    for path in packed_files(packed, "validation"):
        with pa.memory_map(path) as file:
            found.update(row for rows in pa.ipc.open_stream(file).read_all().column("documents").to_pylist() for row in rows)
    kept = sorted(found)
    with pa.memory_map(str(formatted / "validation.arrow")) as file:
        return pa.ipc.open_stream(file).read_all().column("parts").take(pa.array(kept[:limit], pa.int64())).to_pylist()


def _reference(parts: Sequence[str], stop_token: str) -> str:
    return parts[1].removesuffix(stop_token).strip()


if __name__ == "__main__":
    run_stage(evaluate)
