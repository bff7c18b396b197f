"""Tokenise the formatted rows and pack them into fixed-length sequences, every token accounted for.

Contract: tokens_in = tokens_kept + tokens_truncated + tokens_dropped. A document without a supervised token never
reaches a sequence. Ids go through a temporary file, 4 bytes each; memory holds lengths. The bytes do not depend on the
number of cores or on the tokenizer engine, which is tried on this very data before it is used.

Command: python -m stages.pack --formatted data/formatted --model models/base --packed data/packed --metrics metrics/pack.json
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.artifact import publish
from pipeline.config.errors import DataError
from pipeline.config.params import PackParams
from pipeline.dataset.engine import choose_engine
from pipeline.dataset.manifest import SPLITS, PackedFacts, read_formatted
from pipeline.dataset.masking import load_tokenizer
from pipeline.dataset.packing import best_fit_decreasing, write_packed
from pipeline.dataset.spool import fill_spool, sample_rows
from pipeline.environment import cores
from pipeline.stage import run_stage


@dataclass(frozen=True)
class PackMetrics:
    """Counts over both splits; `fill`, `sequences` and the supervised figures are of the training split.

    merged_borders: documents whose joined text would have other ids, because a token would span two parts.
    tokens_repeated: part of tokens_in; by how much the fragments of split documents are longer, as they repeat the system turn.
    """

    documents: int
    documents_dropped: int
    documents_split: int
    merged_borders: int
    tokens_in: int
    tokens_kept: int
    tokens_truncated: int
    tokens_dropped: int
    tokens_repeated: int
    sequences: int
    validation_sequences: int
    fill: float
    supervised_tokens: int
    supervised_share: float
    engine: str
    seconds: float
    tokens_per_second: int


def pack(pack: PackParams, *, formatted: Path, model: Path, packed: Path) -> PackMetrics:
    """Pack the training and the validation split."""
    start = time.perf_counter()
    source = read_formatted(formatted, model)
    tokenizer = load_tokenizer(model)
    stop_token_id = tokenizer.id_of(source.stop_token)
    files = {split: formatted / f"{split}.arrow" for split in SPLITS}
    engine = choose_engine(tokenizer, [row for path in files.values() for row in sample_rows(path)])
    print(f"pack: tokenizer engine {engine.name}: {engine.reason}", flush=True)
    rows = {"train": source.train_rows, "validation": source.validation_rows}
    total, by_split = Counter[str](), dict[str, Counter[str]]()
    facts: dict[str, object] = {}
    with publish(packed, facts) as folder:
        for split in SPLITS:
            with fill_spool(files[split], rows[split], folder, tokenizer, engine, pack, cores()) as (spool, counts):
                plan = best_fit_decreasing(spool.lengths, pack.max_length)
                write_packed(folder, split, spool, plan, pack.max_length, workers=cores())
            by_split[split] = counts + Counter(sequences=plan.sequences)
            total += by_split[split]
        train = by_split["train"]
        if not train["sequences"]:
            raise DataError(
                f"{formatted}: all {total['documents']} documents dropped, none has a supervised token within pack.max_length "
                f"{pack.max_length}; raise it or set pack.long_documents"
            )
        fill = round(train["tokens_kept"] / (train["sequences"] * pack.max_length), 4)
        facts |= asdict(
            PackedFacts(
                template=source.template,
                template_digest=source.template_digest,
                stop_token=source.stop_token,
                stop_token_id=stop_token_id,
                tokenizer_digest=source.tokenizer_digest,
                parts_digest=source.parts_digest,
                max_length=pack.max_length,
                train_sequences=train["sequences"],
                train_tokens=train["tokens_kept"],
                train_fill=fill,
                validation_sequences=by_split["validation"]["sequences"],
                documents_dropped=total["documents_dropped"],
                tokens_truncated=total["tokens_truncated"],
                tokens_dropped=total["tokens_dropped"],
            )
        )
    assert total["tokens_in"] == total["tokens_kept"] + total["tokens_truncated"] + total["tokens_dropped"]
    seconds = time.perf_counter() - start
    return PackMetrics(
        documents=total["documents"],
        documents_dropped=total["documents_dropped"],
        documents_split=total["documents_split"],
        merged_borders=total["merged_borders"],
        tokens_in=total["tokens_in"],
        tokens_kept=total["tokens_kept"],
        tokens_truncated=total["tokens_truncated"],
        tokens_dropped=total["tokens_dropped"],
        tokens_repeated=total["tokens_repeated"],
        sequences=train["sequences"],
        validation_sequences=by_split["validation"]["sequences"],
        fill=fill,
        supervised_tokens=train["supervised_tokens"],
        supervised_share=round(train["supervised_tokens"] / train["tokens_kept"], 4),
        engine=engine.name,
        seconds=round(seconds, 3),
        tokens_per_second=round(total["tokens_in"] / seconds),
    )


if __name__ == "__main__":
    run_stage(pack)
