"""Held-out rows as packing left them: what a model of this sequence length can be asked.

Contract: `read_held_out` gives the first rows of which anything was packed, in the order of the formatted set. The loss is over
`documents`: the ids and labels that training would see, cut or in fragments where the row was too long. A question and its
answer are there only if both, and the stop token, stand in the packed set: a model cannot be held to an answer whose end its
length does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dataset.batches import read_batches
from pipeline.dataset.manifest import packed_files
from pipeline.dataset.masking import IGNORED, Document


@dataclass(frozen=True)
class HeldOut:
    """One row. documents: in the order of the text; asked: the first question and its answer, stop token included."""

    documents: tuple[Document, ...]
    asked: tuple[str, str] | None


def read_held_out(packed: Path, formatted: Path, limit: int, stop: int) -> list[HeldOut]:
    """Up to `limit` rows; stop: id of the token that ends an answer."""
    batches = [read_batches(Path(path)) for path in packed_files(packed, "validation")]
    numbers = [np.unique(batch.column("documents").flatten().to_numpy()) for file in batches for batch in file]
    chosen = np.unique(np.concatenate([np.empty(0, np.int32), *numbers]))[:limit]
    found: dict[int, dict[int, Document]] = {int(row): {} for row in chosen}
    for path in packed_files(packed, "validation"):
        for batch in read_batches(Path(path)):
            for row, first, document in _documents(batch, chosen):
                found[row][first] = document
    with pa.memory_map(str(formatted / "validation.arrow")) as file:
        parts = pa.ipc.open_stream(file).read_all().column("parts").take(pa.array(chosen, pa.int64())).to_pylist()
    return [
        HeldOut(tuple(documents[first] for first in sorted(documents)), _asked(documents.get(0), text, stop))
        for documents, text in zip(found.values(), parts, strict=True)
    ]


def _documents(batch: Any, chosen: np.ndarray) -> Iterator[tuple[int, int, Document]]:
    """Row, first part and tokens of each document of the chosen rows; documents fill the sequences of a batch end to end."""
    columns = ("documents", "first_parts", "seq_lengths", "input_ids", "labels")
    rows, firsts, lengths, ids, labels = (batch.column(name).flatten().to_numpy() for name in columns)
    ends = np.cumsum(lengths, dtype=np.int64)
    for index in np.flatnonzero(np.isin(rows, chosen)):
        span = slice(int(ends[index] - lengths[index]), int(ends[index]))
        yield int(rows[index]), int(firsts[index]), Document(ids[span].tolist(), labels[span].tolist())


def _asked(document: Document | None, parts: list[str], stop: int) -> tuple[str, str] | None:
    """Question and answer with which a row begins; None where there is no question, or the answer is not there to its end."""
    if document is None or not parts[0]:
        return None
    answer = next(n for n, label in enumerate(document.labels) if label != IGNORED)
    rest = document.labels[answer:]
    end = rest.index(IGNORED) if IGNORED in rest else len(rest)
    return (parts[0], parts[1]) if rest[end - 1] == stop else None
