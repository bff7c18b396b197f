"""Raw rows to text parts under an instruction template, each row accounted for.

Contract: rows_in = rows_kept + rows_duplicate + rows_rejected. `formatted` holds train.arrow and validation.arrow
(parts, place, key), rejects.jsonl with file, line and reason, and the manifest.

Command: python -m stages.format --raw data/raw --model models/base --formatted data/formatted --metrics metrics/format.json
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import pyarrow as pa

from pipeline.artifact import publish
from pipeline.config.errors import DataError
from pipeline.config.params import FormatParams
from pipeline.dataset.convert import ignored_fields, to_example
from pipeline.dataset.manifest import FormattedFacts, tokenizer_digest
from pipeline.dataset.read import Record, Reject, find_files, read_rows
from pipeline.dataset.split import is_held_out, row_key
from pipeline.dataset.templates import load_template, special_tokens
from pipeline.stage import run_stage

SCHEMA = pa.schema({"parts": pa.list_(pa.string()), "place": pa.string(), "key": pa.string()})
ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class FormatMetrics:
    rows_in: int
    rows_kept: int
    rows_duplicate: int
    rows_rejected: int
    rejected_by_reason: dict[str, int]
    train_rows: int
    validation_rows: int
    sources: dict[str, int]
    ignored_fields: dict[str, int]
    seconds: float


def format(format: FormatParams, *, raw: Path, model: Path, formatted: Path) -> FormatMetrics:
    """Format every row of the named raw files."""
    start = time.perf_counter()
    files = find_files(raw, format.files)
    template = load_template(format.template, model)
    forbidden = special_tokens(model)
    sources, reasons, ignored = Counter[str](), Counter[str](), Counter[str]()
    seen: set[str] = set()
    kept = {"train": 0, "validation": 0}
    duplicates = 0
    facts: dict[str, object] = {}
    with publish(formatted, facts) as folder:
        writers = {split: _RowWriter(folder / f"{split}.arrow") for split in kept}
        with (folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
            for path in files:
                for row in read_rows(path):
                    sources[path.name] += 1
                    if isinstance(row, Record):
                        ignored.update(ignored_fields(row))
                        row = to_example(row, forbidden)
                    if isinstance(row, Reject):
                        _note(row, reasons, rejects)
                        continue
                    key = row_key(row)
                    if key in seen:
                        duplicates += 1
                        continue
                    seen.add(key)
                    try:
                        parts = template.render(row)
                    except DataError as error:  # this row only: a template that fails for all fails when it is loaded
                        _note(Reject(row.place, "template", str(error).removeprefix(f"{row.place}: ")), reasons, rejects)
                        continue
                    split = "validation" if is_held_out(row, format.validation_share, format.split_seed) else "train"
                    kept[split] += 1
                    writers[split].write(parts, row.place, key)
        for writer in writers.values():
            writer.close()
        _check_rejects(reasons, sum(sources.values()), format.max_reject_share, raw)
        if not kept["train"]:
            raise DataError(
                f"{raw}: {sum(kept.values())} usable rows, none left to train on; lower format.validation_share or add rows"
            )
        facts |= asdict(
            FormattedFacts(
                template.name, template.digest, template.stop_token, tokenizer_digest(model), kept["train"], kept["validation"]
            )
        )
    rows_in, rejected = sum(sources.values()), sum(reasons.values())
    assert rows_in == sum(kept.values()) + duplicates + rejected
    return FormatMetrics(
        rows_in=rows_in,
        rows_kept=sum(kept.values()),
        rows_duplicate=duplicates,
        rows_rejected=rejected,
        rejected_by_reason=dict(reasons),
        train_rows=kept["train"],
        validation_rows=kept["validation"],
        sources=dict(sources),
        ignored_fields=dict(ignored),
        seconds=round(time.perf_counter() - start, 3),
    )


class _RowWriter:
    """Rows to an Arrow stream file in batches of a fixed size, so that memory is bounded and bytes repeat."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, SCHEMA)
        self._rows: list[dict[str, object]] = []

    def write(self, parts: tuple[str, ...], place: str, key: str) -> None:
        self._rows.append({"parts": parts, "place": place, "key": key})
        if len(self._rows) == ROWS_PER_BATCH:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._stream.close()
        self._sink.close()

    def _flush(self) -> None:
        if self._rows:
            self._stream.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []


def _note(reject: Reject, reasons: Counter[str], file: TextIO) -> None:
    reasons[reject.reason] += 1
    file.write(json.dumps(asdict(reject), ensure_ascii=False) + "\n")


def _check_rejects(reasons: Counter[str], rows: int, limit: float, raw: Path) -> None:
    rejected = sum(reasons.values())
    if rejected > limit * rows:
        top = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
        raise DataError(
            f"{raw}: {rejected} of {rows} rows rejected ({rejected / rows:.1%}), format.max_reject_share is {limit:.1%}; "
            f"most are: {top}; repair the file or raise the limit"
        )


if __name__ == "__main__":
    run_stage(format)
