"""What becomes of raw rows: each is counted once, and what is kept is written as often as it is taken.

Contract: `Rows` reads, converts and renders rows as they come; it rejects them, meets them again, or keeps them on disk until
all are known. `Verdict` then decides for each: near duplicate or not, within its source's cap or not, held out or trained
on, free of held-out passages or not, taken as often as its weight says. Memory holds some 160 bytes for each row.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

from pipeline.artifact import canonical, digest_text
from pipeline.config.errors import DataError
from pipeline.config.params import FormatParams
from pipeline.dataset.batches import PartsDigest, read_batches, row_bytes
from pipeline.dataset.convert import EVIDENCE_ROWS, detect
from pipeline.dataset.dedup import Passages, Signatures
from pipeline.dataset.mixture import copies, within_limits
from pipeline.dataset.preparing import ROWS_PER_CHUNK, SAID, SCHEMA, Chunk, Prepared, Preparer, prepared_chunks
from pipeline.dataset.reading.read import ENDS_FILE, Record, Reject, file_name, read_rows
from pipeline.dataset.reading.record import next_rows
from pipeline.progress import progress

pa: Any = pyarrow

COPIED_BYTES = 16 << 20
"""Text in a batch of rows that are taken several times: a thousand copies of 4 MB would not fit into one."""

PLACES_SHOWN = 3
"""Places named for each of the top reasons when too many rows are rejected."""


class Rows:
    """Rows as they come prepared: rejected, met before, or kept on disk until all are known.

    A unit is what stands or falls together: the rows made of one conversation. For each unit: source, key and whether its
    question is held out; for each row on disk the number of its unit.
    """

    def __init__(self, params: FormatParams, folder: Path, rejects: TextIO) -> None:
        self._params, self._rejects = params, rejects
        self.signatures = Signatures(folder / "signatures.partial") if params.near_duplicates else None
        self.spool = folder / "rows.partial"
        self.sources, self.ignored, self.skipped = Counter[str](), Counter[str](), Counter[str]()
        self.forms: dict[str, str] = {}
        self.reasons = Counter[str]()
        self.examples: dict[str, list[str]] = {}
        self.broken: list[Reject] = []
        self.duplicates = self.expanded = self.escaped = self.stripped = 0
        self._seen: set[int] = set()  # of 128 bits each: two of 10 million rows fall together with a chance of 1e-25
        self.unit_source, self.unit_key, self.unit_held_out = array("H"), array("Q"), bytearray()
        self.row_unit = array("I")

    @property
    def rows_in(self) -> int:
        return sum(self.sources.values()) + self.expanded

    def read(self, files: Sequence[tuple[int, Path]], raw: Path, model: Path, preparer: Preparer, workers: int) -> None:
        """All rows of all files; what comes of them does not depend on the number of workers."""
        schema = SCHEMA.append(SAID) if self._params.decontaminate else SCHEMA
        with (
            pa.OSFile(str(self.spool), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as stream,
            progress("format", None) as advance,
        ):
            for made in prepared_chunks(preparer, self._params, model, self._chunks(files, raw), workers):
                batch = self._take(made)
                advance(len(made.unit) + len(made.rejects))
                if batch.num_rows:
                    stream.write_batch(batch)

    def _chunks(self, files: Sequence[tuple[int, Path]], raw: Path) -> Iterator[Chunk]:
        """The rows of each file in chunks, with the form that is stated or that the first rows show."""
        for source, path in files:
            params, name = self._params.sources[source], file_name(path, raw)
            rows = read_rows(path, raw, self.skipped)
            head = next_rows(rows, EVIDENCE_ROWS)
            records = (row for row in head if isinstance(row, Record))
            form = detect(records, {**params.columns}) if params.record == "auto" else params.record
            self.forms[name] = form or "unknown"
            whole = itertools.chain(head, rows)
            while chunk := next_rows(whole, ROWS_PER_CHUNK):
                self.sources[name] += len(chunk)
                yield Chunk(source, form, chunk)

    def _take(self, made: Prepared) -> Any:
        """Count a chunk, and give the rows of it that were not met before."""
        for key, reject in made.rejects:
            if key is None or key not in self._seen:
                self._reject(reject)
            else:
                self.duplicates += 1
            if key is not None:
                self._seen.add(key)
        self.expanded += made.expanded
        self.ignored.update(made.ignored)
        number = np.full(len(made.keys), -1, dtype=np.int64)
        for unit, key in enumerate(made.keys):
            if key in self._seen:
                self.duplicates += 1
                continue
            self._seen.add(key)
            number[unit] = len(self.unit_key)
            self.unit_source.append(made.source)
            self.unit_key.append(key >> 64)
            self.unit_held_out.append(made.held_out[unit])
        self.escaped += int((number[made.escaped] >= 0).sum())
        self.stripped += int((number[made.stripped] >= 0).sum())
        if self.signatures and made.signatures is not None:
            self.signatures.add(made.signatures[number >= 0])
        unit = number[made.unit]
        new = unit >= 0
        self.row_unit.extend(unit[new].tolist())
        self.expanded += int(new.sum()) - int((number >= 0).sum())
        return made.batch if new.all() else made.batch.filter(pa.array(new))

    def _reject(self, reject: Reject) -> None:
        self.reasons[reject.reason] += 1
        if reject.reason in ENDS_FILE - {"empty_file"}:
            self.broken.append(reject)
        places = self.examples.setdefault(reject.reason, [])
        if len(places) < PLACES_SHOWN:
            places.append(reject.place)
        self._rejects.write(json.dumps(asdict(reject), ensure_ascii=False) + "\n")


class Verdict:
    """What becomes of each unit, once all are known: dropped for a stated reason, held out, or taken so many times."""

    def __init__(self, params: FormatParams, rows: Rows) -> None:
        self._spool = rows.spool
        source = np.frombuffer(rows.unit_source, dtype=np.uint16)
        key = np.frombuffer(rows.unit_key, dtype=np.uint64)
        self._unit = np.frombuffer(rows.row_unit, dtype=np.uint32)
        self._size = np.bincount(self._unit, minlength=len(source))
        alive = np.ones(len(source), dtype=bool)
        self.duplicates: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        if rows.signatures and params.near_duplicates:
            near = rows.signatures.near_duplicates(params.near_duplicates.threshold) != np.arange(len(source))
            rows.signatures.remove()
            self.duplicates["near"] = self._drop(alive, near)
        chosen = np.flatnonzero(alive)
        out = np.zeros(len(source), dtype=bool)
        limits = [s.limit for s in params.sources]
        out[chosen] = ~within_limits(key[chosen], source[chosen], limits, params.split_seed)
        self.left_out["limit"] = self._drop(alive, out)
        held_out = np.frombuffer(rows.unit_held_out, dtype=np.uint8).astype(bool)
        if params.decontaminate:
            shared = self._shares_passage(params.decontaminate.run, alive & held_out, alive & ~held_out)
            self.duplicates["decontaminated"] = self._drop(alive, shared)
        times = np.where(held_out, 1, copies(key, source, [s.weight for s in params.sources], params.split_seed))
        self.left_out["weight"] = self._drop(alive, times == 0)
        self._times = {"train": np.where(alive & ~held_out, times, 0), "validation": np.where(alive & held_out, 1, 0)}
        self.written = {split: int((t * self._size).sum()) for split, t in self._times.items()}
        self.repeated = sum(self.written.values()) - int(self._size[alive].sum())

    def write(self, folder: Path) -> str:
        """The rows on disk to the splits, as often as each is taken. Returns a digest of what the rows of both say."""
        digests = {split: PartsDigest() for split in self._times}
        with ExitStack() as stack:
            writers: dict[str, Any] = {}

            def write(split: str, batch: Any) -> None:
                writers[split].write_batch(batch)
                digests[split].add(batch.column("parts"))

            for split in self._times:
                sink = stack.enter_context(pa.OSFile(str(folder / f"{split}.arrow"), "wb"))
                writers[split] = stack.enter_context(pa.ipc.new_stream(sink, SCHEMA))
            for units, batch in self._batches():
                columns = batch.select(SCHEMA.names)
                for split, times in self._times.items():
                    chosen = np.repeat(np.arange(len(units)), times[units])
                    if len(chosen) == len(units) and bool((times[units] == 1).all()):
                        write(split, columns)
                    elif len(chosen):
                        sizes = np.cumsum(row_bytes(batch.column("parts"))[chosen])
                        for rows in np.split(chosen, np.flatnonzero(np.diff(sizes // COPIED_BYTES)) + 1):
                            write(split, columns.take(pa.array(rows)))
        return digest_text(canonical({split: digest.digest() for split, digest in digests.items()}))

    def _drop(self, alive: np.ndarray, which: np.ndarray) -> int:
        """Rows of the units that are dropped now."""
        which = alive & which
        alive &= ~which
        return int(self._size[which].sum())

    def _shares_passage(self, run: int, held_out: np.ndarray, trained: np.ndarray) -> np.ndarray:
        passages = Passages(run)
        found = np.zeros(len(held_out), dtype=bool)
        for units, batch in self._batches():
            passages.add(batch.column("said").filter(pa.array(held_out[units])).to_pylist())
        passages.close()
        for units, batch in self._batches():
            chosen = np.flatnonzero(trained[units])
            shared = passages.shared(batch.column("said").take(pa.array(chosen)).to_pylist())
            found[units[chosen[shared]]] = True
        return found

    def _batches(self) -> Iterator[tuple[np.ndarray, Any]]:
        at = 0
        for batch in read_batches(self._spool):
            yield self._unit[at : at + batch.num_rows], batch
            at += batch.num_rows


def check_rejects(rows: Rows, limit: float, raw: Path) -> None:
    if rows.broken:  # one reject then stands for rows that nobody can count, so a share would say nothing
        first = rows.broken[0]
        more = f" (and {len(rows.broken) - 1} more files)" if len(rows.broken) > 1 else ""
        raise DataError(
            f"{raw}/{first.place}: {first.detail}{more}; what follows in the file is lost, so repair it or leave it out of "
            "format.sources"
        )
    total, rejected = rows.rows_in, sum(rows.reasons.values())
    if rejected > limit * total:
        top = "; ".join(
            f"{reason} {count} ({', '.join(rows.examples[reason])}{', ...' if count > PLACES_SHOWN else ''})"
            for reason, count in rows.reasons.most_common(3)
        )
        raise DataError(
            f"{raw}: {rejected} of {total} rows rejected ({rejected / total:.1%}), format.max_reject_share is {limit:.1%}; "
            f"most are: {top}; repair the file or raise the limit, with which rejects.jsonl names every row"
        )
