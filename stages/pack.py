"""Tokenise the formatted rows and pack them into fixed-length sequences, every token accounted for.

Contract: tokens_in = tokens_kept + tokens_truncated + tokens_dropped. A document without a supervised token never
reaches a sequence. Token ids go through a temporary file: only lengths are held in memory.

Command: python -m stages.pack --formatted data/formatted --model models/base --packed data/packed --metrics metrics/pack.json
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.artifact import publish
from pipeline.config.errors import DataError
from pipeline.config.params import PackParams
from pipeline.dataset.manifest import SPLITS, PackedFacts, read_formatted
from pipeline.dataset.masking import Document, PartTokenizer, load_tokenizer, tokenise, truncated
from pipeline.dataset.packing import best_fit_decreasing, write_packed
from pipeline.stage import run_stage


@dataclass(frozen=True)
class PackMetrics:
    """Counts over both splits; `fill`, `sequences` and the supervised figures are of the training split."""

    documents: int
    documents_dropped: int
    tokens_in: int
    tokens_kept: int
    tokens_truncated: int
    tokens_dropped: int
    sequences: int
    validation_sequences: int
    fill: float
    supervised_tokens: int
    supervised_share: float
    seconds: float
    tokens_per_second: int


def pack(pack: PackParams, *, formatted: Path, model: Path, packed: Path) -> PackMetrics:
    """Pack the training and the validation split."""
    start = time.perf_counter()
    source = read_formatted(formatted, model)
    tokenizer = load_tokenizer(model)
    total, by_split = Counter[str](), dict[str, Counter[str]]()
    facts: dict[str, object] = {}
    with publish(packed, facts) as folder:
        for split in SPLITS:
            by_split[split] = _pack_split(formatted / f"{split}.arrow", folder / f"{split}.arrow", tokenizer, pack)
            total += by_split[split]
        train = by_split["train"]
        if not train["sequences"]:
            raise DataError(
                f"{formatted}: all {total['documents']} documents dropped, none has a supervised token within pack.max_length "
                f"{pack.max_length}; raise it or set pack.long_documents"
            )
        facts |= asdict(
            PackedFacts(
                template=source.template,
                template_digest=source.template_digest,
                stop_token=source.stop_token,
                stop_token_id=tokenizer.id_of(source.stop_token),
                tokenizer_digest=source.tokenizer_digest,
                max_length=pack.max_length,
                train_sequences=train["sequences"],
                train_tokens=train["tokens_kept"],
                validation_sequences=by_split["validation"]["sequences"],
            )
        )
    assert total["tokens_in"] == total["tokens_kept"] + total["tokens_truncated"] + total["tokens_dropped"]
    seconds = time.perf_counter() - start
    return PackMetrics(
        documents=total["documents"],
        documents_dropped=total["documents_dropped"],
        tokens_in=total["tokens_in"],
        tokens_kept=total["tokens_kept"],
        tokens_truncated=total["tokens_truncated"],
        tokens_dropped=total["tokens_dropped"],
        sequences=train["sequences"],
        validation_sequences=by_split["validation"]["sequences"],
        fill=round(train["tokens_kept"] / (train["sequences"] * pack.max_length), 4),
        supervised_tokens=train["supervised_tokens"],
        supervised_share=round(train["supervised_tokens"] / train["tokens_kept"], 4),
        seconds=round(seconds, 3),
        tokens_per_second=round(total["tokens_in"] / seconds),
    )


def _pack_split(source: Path, target: Path, tokenizer: PartTokenizer, params: PackParams) -> Counter[str]:
    counts = Counter[str]()
    lengths: list[int] = []
    rows: list[int] = []
    with tempfile.TemporaryFile(dir=target.parent) as ids, tempfile.TemporaryFile(dir=target.parent) as labels:
        row = -1
        with pa.memory_map(str(source)) as file:
            for batch in pa.ipc.open_stream(file):
                for document in tokenise(batch.column("parts").to_pylist(), tokenizer):
                    row += 1
                    counts["documents"] += 1
                    counts["tokens_in"] += len(document.input_ids)
                    fitted = _fitted(document, params, counts, f"{source}: row {row}")
                    if fitted is None:
                        counts["documents_dropped"] += 1
                        continue
                    ids.write(np.asarray(fitted.input_ids, np.int32).tobytes())
                    labels.write(np.asarray(fitted.labels, np.int32).tobytes())
                    lengths.append(len(fitted.input_ids))
                    rows.append(row)
                    counts["tokens_kept"] += len(fitted.input_ids)
                    counts["supervised_tokens"] += fitted.supervised
        packs = best_fit_decreasing(lengths, params.max_length)
        counts["sequences"] = len(packs)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        write_packed(target, _mapped(ids), _mapped(labels), offsets, rows, packs)
    return counts


def _fitted(document: Document, params: PackParams, counts: Counter[str], place: str) -> Document | None:
    """The document within `max_length`, or None if it is dropped; tokens lost are counted."""
    length = len(document.input_ids)
    if length > params.max_length:
        if params.long_documents == "error":
            raise DataError(
                f"{place}: {length} tokens, pack.max_length is {params.max_length}; raise it or set pack.long_documents"
            )
        if params.long_documents == "drop":
            counts["tokens_dropped"] += length
            return None
        document = truncated(document, params.max_length)
    if not document.supervised:
        counts["tokens_dropped"] += length
        return None
    counts["tokens_truncated"] += length - len(document.input_ids)
    return document


def _mapped(file: BufferedRandom) -> np.ndarray:
    file.flush()
    size = file.seek(0, 2)
    return np.memmap(file, np.int32, "r") if size else np.empty(0, np.int32)


if __name__ == "__main__":
    run_stage(pack)
