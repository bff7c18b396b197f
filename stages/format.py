"""Raw rows to text parts under an instruction template, each row accounted for.

Contract: rows_in = rows_kept + rows_duplicate + rows_rejected + rows_left_out, and rows_in = rows_read + rows_expanded: a raw
row with several `instances`, or one whose answers become rows of their own, counts as many.
train_rows + validation_rows = rows_kept + rows_repeated. `formatted` holds train.arrow and validation.arrow
(parts, place, key), rejects.jsonl with file, line and reason, and the manifest.

Command: python -m stages.format --raw data/raw --model models/base --formatted data/formatted --metrics metrics/format.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.artifact import publish
from pipeline.config.errors import DataError
from pipeline.config.params import FormatParams
from pipeline.config.params import Source as SourceParams
from pipeline.dataset.manifest import FormattedFacts, tokenizer_digest
from pipeline.dataset.preparing import Preparer
from pipeline.dataset.reading.read import find_files
from pipeline.dataset.rows import Rows, Verdict, check_rejects
from pipeline.environment import cores
from pipeline.stage import run_stage


@dataclass(frozen=True)
class FormatMetrics:
    rows_in: int
    rows_kept: int
    rows_duplicate: int
    rows_rejected: int
    rows_left_out: int
    rows_read: int
    rows_expanded: int
    rows_repeated: int
    rejected_by_reason: dict[str, int]
    duplicates_by_kind: dict[str, int]
    left_out_by_kind: dict[str, int]
    train_rows: int
    validation_rows: int
    sources: dict[str, int]
    record_by_source: dict[str, str]
    ignored_fields: dict[str, int]
    skipped_lines: dict[str, int]
    escaped_rows: int
    stripped_rows: int
    seconds: float


def format(format: FormatParams, *, raw: Path, model: Path, formatted: Path) -> FormatMetrics:
    """Format every row of the named raw files."""
    start = time.perf_counter()
    files = _files(raw, format.sources)
    preparer = Preparer(format, model)
    facts: dict[str, object] = {}
    with publish(formatted, facts) as folder, ExitStack() as stack:
        rejects = stack.enter_context((folder / "rejects.jsonl").open("w", encoding="utf-8"))
        rows = Rows(format, folder, rejects)
        rows.read(files, raw, model, preparer, cores())
        check_rejects(rows, format.max_reject_share, raw)
        verdict = Verdict(format, rows)
        parts_digest = verdict.write(folder)
        rows.spool.unlink()
        kept = verdict.written["train"] + verdict.written["validation"]
        if not verdict.written["train"]:
            raise DataError(f"{raw}: {kept} usable rows, none left to train on; lower format.validation_share or add rows")
        facts |= asdict(
            FormattedFacts(
                preparer.template.name,
                preparer.template.digest,
                preparer.template.stop_token,
                tokenizer_digest(model),
                parts_digest,
                verdict.written["train"],
                verdict.written["validation"],
            )
        )
    duplicates = {"exact": rows.duplicates, **verdict.duplicates}
    rejected, left_out = sum(rows.reasons.values()), sum(verdict.left_out.values())
    rows_in = rows.rows_in
    assert rows_in == kept - verdict.repeated + sum(duplicates.values()) + rejected + left_out
    return FormatMetrics(
        rows_in=rows_in,
        rows_kept=kept - verdict.repeated,
        rows_duplicate=sum(duplicates.values()),
        rows_rejected=rejected,
        rows_left_out=left_out,
        rows_read=sum(rows.sources.values()),
        rows_expanded=rows.expanded,
        rows_repeated=verdict.repeated,
        rejected_by_reason=dict(rows.reasons),
        duplicates_by_kind=duplicates,
        left_out_by_kind=verdict.left_out,
        train_rows=verdict.written["train"],
        validation_rows=verdict.written["validation"],
        sources=dict(rows.sources),
        record_by_source=rows.forms,
        ignored_fields=dict(rows.ignored),
        skipped_lines=dict(rows.skipped),
        escaped_rows=rows.escaped,
        stripped_rows=rows.stripped,
        seconds=round(time.perf_counter() - start, 3),
    )


def _files(raw: Path, sources: Sequence[SourceParams]) -> list[tuple[int, Path]]:
    """Every file with the number of its source; DataError for one that two sources name."""
    found: dict[Path, int] = {}
    for number, source in enumerate(sources):
        for path in find_files(raw, source.files):
            if path in found:
                raise DataError(
                    f"{path}: named by format.sources {found[path] + 1} and {number + 1}; its rows can have one weight, "
                    "so leave it to one of them"
                )
            found[path] = number
    return [(number, path) for path, number in found.items()]


if __name__ == "__main__":
    run_stage(format)
