"""Records to rendered rows, a chunk at a time and on all cores: everything that one row needs no other row for.

Contract: `prepared_chunks` gives one Prepared for each chunk, in order, with the same content whatever the number of workers;
at most 2 chunks per worker are held, each of four million characters and a row. Workers are processes, since Python's work on
texts holds the interpreter lock; they start only for a set larger than CHUNKS_ALONE chunks, since starting one takes half a
second. On 2 cores, 800,000 alpaca rows took 42 s with two of them and 56 s with none.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

from pipeline.config.errors import DataError
from pipeline.config.params import FormatParams
from pipeline.dataset.conversation import Conversation
from pipeline.dataset.convert import Converter, Form
from pipeline.dataset.dedup import signatures
from pipeline.dataset.fragments import Cuts
from pipeline.dataset.reading.record import Record, Reject
from pipeline.dataset.rendering import special_tokens
from pipeline.dataset.screening import Screen
from pipeline.dataset.split import is_held_out, row_key
from pipeline.dataset.templates import Template, load_template
from pipeline.launch.process import die_with_parent

pa: Any = pyarrow

SCHEMA = pa.schema(
    {
        "parts": pa.list_(pa.string()),
        "place": pa.string(),
        "key": pa.string(),
        "cuts": pa.list_(pa.int32()),
        "head": pa.int32(),
        "gap": pa.int32(),
    }
)
"""A row of data/formatted. parts: context, supervised, context, ..., beginning with context; place: FILE:NUMBER; key: SHA-256;
cuts, head, gap: as `Cuts`."""
SAID = pa.field("said", pa.string())
"""What question and answers say, kept beside a row until shared passages have been looked for."""

ROWS_PER_CHUNK = 1024
CHUNKS_ALONE = 128


@dataclass(frozen=True)
class Chunk:
    """Rows of one file, as read. form: None where the file shows none."""

    source: int
    form: Form | None
    rows: list[Record | Reject]

    def __reduce__(self) -> tuple[Any, ...]:
        """Rows travel as tuples: 3.4 us a row there and back, where dataclasses take 10.6."""
        rows = [(r.place, r.value) if isinstance(r, Record) else (r.place, r.reason, r.detail) for r in self.rows]
        return _chunk, (self.source, self.form, rows)


def _chunk(source: int, form: Form | None, rows: list[tuple[Any, ...]]) -> Chunk:
    return Chunk(source, form, [Record(*row) if len(row) == 2 else Reject(*row) for row in rows])


@dataclass
class Prepared:
    """A chunk's conversations, each a unit that stands or falls as one.

    keys: (units,) the first 128 bits of each key; held_out: (units,) 0 or 1; unit: (rows,) the unit of each row of `batch`.
    rejects: with the key where the template refused the row, None where it was refused before. expanded: rows that one raw row
    became beyond the first, before rendering.
    """

    source: int
    batch: Any = None
    unit: list[int] = field(default_factory=list[int])
    keys: list[int] = field(default_factory=list[int])
    held_out: bytearray = field(default_factory=bytearray)
    escaped: list[int] = field(default_factory=list[int])
    stripped: list[int] = field(default_factory=list[int])
    signatures: np.ndarray[Any, Any] | None = None
    rejects: list[tuple[int | None, Reject]] = field(default_factory=list[tuple[int | None, Reject]])
    expanded: int = 0
    ignored: Counter[str] = field(default_factory=Counter[str])


class Preparer:
    """The policies of one run, ready for use."""

    def __init__(self, params: FormatParams, model: Path) -> None:
        self._params = params
        self.template: Template = load_template(
            params.template, params.own_template, model, supervise=params.supervise, reasoning=params.reasoning
        )
        self._screen = Screen(special_tokens(model), params.special_tokens, strip=params.reasoning == "strip")

    def prepare(self, chunk: Chunk) -> Prepared:
        made = Prepared(chunk.source)
        rows = _Columns()
        columns: dict[str, str] = {**self._params.sources[chunk.source].columns}
        converter = Converter(chunk.form, columns) if chunk.form else None
        for row in chunk.rows:
            if isinstance(row, Reject):
                made.rejects.append((None, row))
            elif converter is None:
                keys = ", ".join(sorted(map(ascii, row.value))[:8]) or "none"
                detail = f"its keys, {keys}, are those of no form; state format.sources.record or columns"
                made.rejects.append((None, Reject(row.place, "unknown_form", detail)))
            else:
                found = converter.convert(row)
                if isinstance(found, Reject):
                    made.rejects.append((None, found))
                    continue
                made.expanded += len(found) - 1
                for conversation in found:
                    self._render(conversation, made, rows)
        made.batch = rows.batch(with_said=self._params.decontaminate is not None)
        if self._params.near_duplicates:
            first: list[int] = np.unique(np.array(made.unit, dtype=np.int64), return_index=True)[1].tolist()
            made.signatures = signatures([rows.said[row] for row in first], self._params.near_duplicates.shingle)
        if converter:
            made.ignored = converter.ignored
        return made

    def _render(self, conversation: Conversation, made: Prepared, rows: _Columns) -> None:
        screened = self._screen.check(conversation)
        if isinstance(screened, Reject):
            made.rejects.append((None, screened))
            return
        conversation = screened.conversation
        key = row_key(conversation)
        short = int(key[:32], 16)
        try:
            rendered = self.template.rows(conversation)
        except DataError as error:  # this row only: a template that fails for all fails when it is loaded
            detail = str(error).removeprefix(f"{conversation.place}: ")
            made.rejects.append((short, Reject(conversation.place, "template", detail)))
            return
        unit = len(made.keys)
        if screened.escaped:
            made.escaped.append(unit)
        if screened.stripped:
            made.stripped.append(unit)
        made.keys.append(short)
        made.held_out.append(is_held_out(conversation, self._params.validation_share, self._params.split_seed))
        said = ""
        if self._params.near_duplicates or self._params.decontaminate:
            said = "\n".join(turn.text for turn in conversation.turns if turn.role in ("user", "assistant"))
        for parts in rendered:
            made.unit.append(unit)
            rows.add(parts, conversation.place, key, said, self.template.cuts(conversation, parts))


class _Columns:
    """Rows collected by column, which Arrow takes in at once."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.places: list[str] = []
        self.keys: list[str] = []
        self.said: list[str] = []
        self.offsets = [0]
        self.cuts: list[int] = []
        self.cut_offsets = [0]
        self.heads: list[int] = []
        self.gaps: list[int] = []

    def add(self, parts: tuple[str, ...], place: str, key: str, said: str, cuts: Cuts) -> None:
        self.parts += parts
        self.offsets.append(len(self.parts))
        self.places.append(place)
        self.keys.append(key)
        self.said.append(said)
        self.cuts += cuts.parts
        self.cut_offsets.append(len(self.cuts))
        self.heads.append(cuts.head)
        self.gaps.append(cuts.gap)

    def batch(self, *, with_said: bool) -> Any:
        ints = pa.int32()
        columns = [
            pa.ListArray.from_arrays(pa.array(self.offsets, ints), pa.array(self.parts, pa.string())),
            pa.array(self.places, pa.string()),
            pa.array(self.keys, pa.string()),
            pa.ListArray.from_arrays(pa.array(self.cut_offsets, ints), pa.array(self.cuts, ints)),
            pa.array(self.heads, ints),
            pa.array(self.gaps, ints),
        ]
        if with_said:
            return pa.record_batch([*columns, pa.array(self.said, pa.string())], schema=SCHEMA.append(SAID))
        return pa.record_batch(columns, schema=SCHEMA)


def prepared_chunks(
    preparer: Preparer, params: FormatParams, model: Path, chunks: Iterable[Chunk], workers: int
) -> Iterator[Prepared]:
    """Every chunk prepared, in order; `preparer` takes the first ones, and all of them with one worker."""
    waiting = iter(chunks)
    for chunk in waiting if workers < 2 else islice(waiting, CHUNKS_ALONE):
        yield preparer.prepare(chunk)
    following = next(waiting, None)
    if following is None:
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of Arrow's threads
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(params, model)) as pool:
        due = deque[Future[Prepared]]()
        try:
            while following is not None:
                due.append(pool.submit(_prepare, following))
                if len(due) >= 2 * workers:
                    yield due.popleft().result()
                following = next(waiting, None)
            while due:
                yield due.popleft().result()
        finally:
            for future in due:
                future.cancel()


_preparer: Preparer | None = None


def _start(params: FormatParams, model: Path) -> None:
    global _preparer
    die_with_parent()
    _preparer = Preparer(params, model)


def _prepare(chunk: Chunk) -> Prepared:
    assert _preparer is not None
    return _preparer.prepare(chunk)
