"""What the smoke gate claims, from what was trained and what the data say.

Contract: `choose_sequences` picks the samples, `mask_checks` reads packed data against formatted text, `run_checks`
reads what the ranks left. Nothing here imports torch. Limits come from the smoke section.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config.errors import DataError
from pipeline.config.params import SmokeParams
from pipeline.dataset.manifest import packed_files
from pipeline.dataset.masking import IGNORED, PartTokenizer
from pipeline.gates.verdict import Check, at_least, at_most
from pipeline.training.batching import DataOrder


def choose_sequences(packed: Path, samples: int, global_batch: int) -> list[int]:
    """Packed rows, spread over the set, that hold at least `samples` documents (all, where the set has fewer)."""
    counts = _packed(packed, "documents").column("documents").combine_chunks().value_lengths().to_pylist()
    if not counts:
        raise DataError(f"{packed}: no training sequences; run `dvc repro pack`")
    wanted = min(len(counts), max(math.ceil(samples / (sum(counts) / len(counts))), global_batch))
    while True:
        chosen = sorted({i * len(counts) // wanted for i in range(wanted)})
        if sum(counts[i] for i in chosen) >= samples or wanted == len(counts):
            return chosen
        wanted += 1


def mask_checks(
    packed: Path, formatted: Path, tokenizer: PartTokenizer, stop_token_id: int, sequences: Sequence[int]
) -> list[Check]:
    """Decode the labels of the chosen documents and compare with the text that was to be supervised."""
    parts = _table(formatted / "train.arrow").column("parts")
    table = _packed(packed).take(pa.array(sequences)).to_pylist()
    wrong = unstopped = documents = 0
    for row in table:
        start = 0
        for length, number, first in zip(row["seq_lengths"], row["documents"], row["first_parts"], strict=True):
            ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
            whole = parts[number].as_py()
            text = whole[first:]
            supervised = [label for label in labels if label != IGNORED]
            cut = len(tokenizer.tokenizer.encode("".join(whole), add_special_tokens=False).ids) > length
            documents += 1
            in_place = all(label in (IGNORED, token) for label, token in zip(labels, ids, strict=True))
            wrong += not (in_place and _same_text(tokenizer, supervised, "".join(text[1::2]), prefix=cut))
            unstopped += not cut and (not supervised or supervised[-1] != stop_token_id)
            start += length
    assert documents
    return [
        at_most(
            "loss_mask",
            wrong,
            0,
            "documents whose supervised tokens do not spell the answer and its stop token; look at format and pack",
        ),
        at_most(
            "stop_token",
            unstopped,
            0,
            "documents that do not end in a supervised stop token, so the model would not learn to stop",
        ),
    ]


def documents_due(packed: Path, sequences: Sequence[int], seed: int, global_batch: int, steps: int) -> list[list[int]]:
    """Rows that each step must train on, over all ranks together, sorted: a function of the data order alone."""
    rows = _packed(packed, "documents").column("documents").take(pa.array(sequences)).to_pylist()
    order = list(DataOrder(len(rows), seed, steps * global_batch))
    batches = (order[start : start + global_batch] for start in range(0, len(order), global_batch))
    return [sorted(d for sequence in batch for d in rows[sequence]) for batch in batches]


def run_checks(
    params: SmokeParams,
    due: Sequence[Sequence[int]],
    curve: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
    result: Mapping[str, Any],
) -> list[Check]:
    """Judge a finished smoke run: the documents due, its curve, its rank 0 report and its result."""
    losses = [_number(line["loss"]) for line in curve]
    norms = [_number(line["grad_norm"]) for line in curve]
    infinite = sum(not math.isfinite(v) for v in (*losses, *norms))
    last_pass = losses[-max(1, len(losses) // params.epochs) :]
    drop = 1 - sum(last_pass) / len(last_pass) / losses[0]
    loss_error = abs(losses[0] / _number(report["reference_loss"]) - 1)
    seen = [sorted(d for rank in ranks for d in rank) for ranks in zip(*report["documents"], strict=True)]
    wrong_steps = sum(a != b for a, b in zip(seen, due, strict=True)) if len(seen) == len(due) else len(due)
    memory = result["peak_bytes"]
    return [
        at_most(
            "finite",
            infinite,
            0,
            "steps with a loss or gradient norm that is not finite; lower the learning rate, or use bf16 instead of fp16",
        ),
        at_most(
            "data_once",
            wrong_steps,
            0,
            "steps whose ranks together did not see exactly the rows due: a rank repeats another's data, or the order is another",
        ),
        at_most(
            "loss_reference",
            loss_error,
            params.max_loss_error,
            "the first loss is not the one computed document by document in one process: documents see each other, "
            "the mask differs, or the loss is scaled wrongly",
        ),
        at_most(
            "gradient_reference",
            _number(report["gradient_error"]),
            params.max_gradient_error,
            "the first gradient is not the one of a single process: ranks are not summed, or accumulation is scaled wrongly",
        ),
        at_most("gradient_zero", sum(v == 0 for v in norms), 0, "steps without any gradient: nothing is trained"),
        at_least(
            "loss_falls",
            drop,
            params.min_loss_drop,
            "the loss did not fall by this share; look at learning rate, data and optimizer",
        ),
        at_most(
            "weights_equal",
            _number(report["weight_gap"]),
            0,
            "weights differ between ranks after training: an update did not reach all",
        ),
        at_most(
            "memory_skew",
            max(memory) / min(memory),
            params.max_memory_skew,
            "one rank needs more memory than another; look at the partitioning",
        ),
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _same_text(tokenizer: PartTokenizer, ids: list[int], text: str, *, prefix: bool) -> bool:
    decoded = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    if decoded == text:
        return True
    # A tokenizer with a normaliser changes the form of characters by design, and some drop one leading space in decoding.
    if tokenizer.tokenizer.normalizer is not None or decoded.lstrip(" ") == text.lstrip(" "):
        decoded, text = (unicodedata.normalize("NFKC", t).strip() for t in (decoded, text))
    return text.startswith(decoded.rstrip("\ufffd")) if prefix else decoded == text


def _packed(folder: Path, *columns: str) -> pa.Table:
    """The training sequences, mapped; all columns if none is named."""
    tables = [_table(Path(path)) for path in packed_files(folder, "train")]
    return pa.concat_tables(table.select(columns) if columns else table for table in tables)


def _table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()
