"""Formatted rows to documents that wait to be packed: tokenised, fitted to the length limit, ids on disk.

Contract: `fill_spool` gives the same documents in the same order for any number of workers and any batches in the file.
Every token is counted: tokens_in = tokens_kept + tokens_truncated + tokens_dropped, and a document without a supervised
token is dropped. Memory holds a few pieces of `PIECE_BYTES` of text and 12 bytes per document, however large the set.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow  # pyright: ignore[reportMissingTypeStubs] - ships no types

from pipeline.config.errors import DataError
from pipeline.config.params import PackParams
from pipeline.dataset.batches import offsets_in, read_batches, row_bytes
from pipeline.dataset.engine import Engine
from pipeline.dataset.fragments import Cuts, fragment
from pipeline.dataset.masking import PartTokenizer, Tokens, gather, merged, tokenise_batch
from pipeline.progress import progress

pa: Any = pyarrow

PIECE_ROWS = 1024
PIECE_BYTES = 4 << 20
"""What a worker tokenises at once; a row above it is a piece of its own."""
SAMPLE_BYTES = 1 << 19

Ints = npt.NDArray[np.int64]
In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Spool:
    """Documents that wait to be packed, ids on disk and the rest in memory.

    file: int32 over all documents as in `Tokens.stored`, half of what ids and labels would take. lengths, rows,
    first_parts: (documents,) int32: tokens, row number in the formatted set, and the part of the row with which the
    document begins (0 unless a row was split).
    """

    file: FileIO
    lengths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    first_parts: npt.NDArray[np.int32]

    def read(self, starts: Ints, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The values of some documents, end to end; starts: the number of values before each.

        Read and not mapped: packing reads in scattered order, and each touch of a mapping makes 64 KiB or more resident.
        """
        values = np.empty(int(lengths.sum()), np.int32)
        view, position, number = values.view(np.uint8).data, 0, self.file.fileno()
        for start, size in zip((4 * starts).tolist(), (4 * lengths).tolist(), strict=True):
            while size:
                got = os.preadv(number, [view[position : position + size]], start)
                if not got:
                    raise OSError(f"the temporary file of ids ends at byte {start}")
                start, position, size = start + got, position + got, size - got
        return values


@dataclass(frozen=True)
class Piece:
    """Some formatted rows: number of the first, parts, places; all columns as they lie in the file."""

    first: int
    rows: list[list[str]]
    places: list[str]
    batch: Any

    def cuts(self, row: int) -> Cuts:
        """Where one of them may be cut."""
        columns = (self.batch.column(name)[row].as_py() for name in ("cuts", "head", "gap"))
        parts, head, gap = columns
        return Cuts(tuple(parts), head, gap)


@dataclass(frozen=True)
class Fitted:
    """The documents made of a piece, in the form of `Spool`, and what was counted."""

    stored: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    first_parts: npt.NDArray[np.int32]
    counts: Counter[str]


@contextlib.contextmanager
def fill_spool(
    source: Path, rows: int, scratch: Path, tokenizer: PartTokenizer, engine: Engine, params: PackParams, workers: int
) -> Generator[tuple[Spool, Counter[str]]]:
    """Tokenise and fit all rows of a formatted split; the spool lasts as long as the context.

    rows: how many there are, for the progress bar; scratch: folder for the temporary file, 4 bytes per token.
    """
    counts = Counter[str]()
    arrays: list[tuple[npt.NDArray[np.int32], ...]] = []
    with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
        with progress(f"pack {source.stem}: rows tokenised", rows) as advance:
            pieces = read_pieces(source)
            for fitted in in_order(lambda piece: fit(piece, source, tokenizer, engine, params), pieces, workers):
                _write(file, fitted.stored)
                arrays.append((fitted.lengths, fitted.rows, fitted.first_parts))
                counts += fitted.counts
                advance(fitted.counts["documents"])
        none = np.empty(0, np.int32)
        lengths, numbers, first_parts = (np.concatenate([none, *(columns[i] for columns in arrays)]) for i in range(3))
        yield Spool(file, lengths, numbers, first_parts), counts


def fit(piece: Piece, source: Path, tokenizer: PartTokenizer, engine: Engine, params: PackParams) -> Fitted:
    """Tokenise a piece and apply the policy for long documents. DataError for one, where the policy is `error`."""
    found = tokenise_batch(piece.rows, tokenizer, engine.encode, engine.inside)
    counts = Counter(
        documents=len(piece.rows), merged_borders=int(merged(piece.rows, tokenizer, engine.encode, engine.inside).sum())
    )
    stored, starts, lengths = found.stored, found.offsets[:-1], np.diff(found.offsets)
    numbers, first_parts = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    truncate = params.long_documents == "truncate"
    cut = np.minimum(lengths, params.max_length) if truncate else lengths
    supervised = found.supervised_tokens(cut)
    long = np.flatnonzero(lengths > params.max_length)
    if len(long) and params.long_documents == "error":
        index = int(long[0])
        raise DataError(
            f"{source}: row {piece.first + index} ({piece.places[index]}): {lengths[index]} tokens, pack.max_length is "
            f"{params.max_length}; raise it or set pack.long_documents"
        )
    if len(long) and params.long_documents == "split":
        cuts = {int(i): piece.cuts(int(i)) for i in long}
        heads = tokenise_batch([[piece.rows[i][0][: c.head]] for i, c in cuts.items()], tokenizer, engine.encode, engine.inside)
        spans = [
            (i, first, end)
            for (i, c), repeated in zip(cuts.items(), np.diff(heads.offsets).tolist(), strict=True)
            for first, end in _spans(found, i, c, params.max_length, repeated)
        ]
        counts["documents_split"] = len({i for i, first, _ in spans if first})
        made = tokenise_batch(
            [fragment(piece.rows[i], first, end, cuts[i].head, cuts[i].gap) for i, first, end in spans],
            tokenizer,
            engine.encode,
            engine.inside,
        )
        made_lengths = np.diff(made.offsets)
        counts["tokens_repeated"] = int(made_lengths.sum() - lengths[long].sum())
        whole = lengths <= params.max_length
        numbers = np.concatenate([numbers[whole], [i for i, _, _ in spans]])
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        first_parts = np.concatenate([first_parts[whole], [a for _, a, _ in spans]])[order]
        starts = np.concatenate([starts[whole], made.offsets[:-1] + len(stored)])[order]
        lengths = cut = np.concatenate([lengths[whole], made_lengths])[order]
        supervised = np.concatenate([supervised[whole], made.supervised_tokens(made_lengths)])[order]
        stored = np.concatenate([stored, made.stored])
    kept = (supervised > 0) & (cut <= params.max_length)
    counts.update(
        documents_dropped=len(piece.rows) - len(np.unique(numbers[kept])),
        tokens_in=int(lengths.sum()),
        tokens_kept=int(cut[kept].sum()),
        tokens_truncated=int((lengths - cut)[kept].sum()),
        tokens_dropped=int(lengths[~kept].sum()),
        supervised_tokens=int(supervised[kept].sum()),
    )
    if counts["tokens_kept"] < len(stored):
        stored = gather(stored, starts[kept], cut[kept])
    lengths, numbers, first_parts = (a[kept].astype(np.int32) for a in (cut, piece.first + numbers, first_parts))
    return Fitted(stored, lengths, numbers, first_parts, counts)


def read_pieces(source: Path) -> Iterator[Piece]:
    """The rows of a formatted file, in order, in pieces of bounded size."""
    first = 0
    for batch in read_batches(source):
        sizes = row_bytes(batch.column("parts"))
        start = 0
        while start < batch.num_rows:
            fits = int(np.searchsorted(np.cumsum(sizes[start : start + PIECE_ROWS]), PIECE_BYTES, side="right"))
            rows = batch.slice(start, max(1, fits))
            yield Piece(first + start, _rows(rows.column("parts")), rows.column("place").to_pylist(), rows)
            start += rows.num_rows
        first += batch.num_rows


def sample_rows(source: Path) -> list[list[str]]:
    """Rows to try an engine on: the first, the last, 1,024 spread between them, and the 4 longest of at most 32 KiB.

    Fewer, at least 16, where rows are long: about 768 KiB of text, which cost the slower engine a quarter of a second.
    """
    longest: list[tuple[int, int]] = []
    rows = size = 0
    for batch in read_batches(source):
        sizes = row_bytes(batch.column("parts"))
        size += int(sizes.sum())
        sizes[sizes > SAMPLE_BYTES // 16] = 0
        top = np.argsort(sizes)[-4:]
        longest = heapq.nlargest(4, [*longest, *zip(sizes[top].tolist(), (rows + top).tolist(), strict=True)])
        rows += batch.num_rows
    spread = min(1024, max(16, SAMPLE_BYTES * rows // max(size, 1)))
    ends = spread // 4
    wanted = {*range(min(ends, rows)), *range(max(0, rows - ends), rows), *(i * rows // spread for i in range(spread) if rows)}
    chosen = np.array(sorted(wanted | {row for _, row in longest}), np.int64)
    found: list[list[str]] = []
    first = 0
    for batch in read_batches(source):
        for row in chosen[(chosen >= first) & (chosen < first + batch.num_rows)].tolist():
            found += _rows(batch.column("parts").slice(row - first, 1))
        first += batch.num_rows
    return found


def in_order(function: Callable[[In], Out], items: Iterable[In], workers: int) -> Iterator[Out]:
    """`map` on threads that keeps order and looks at most 2 x workers items ahead.

    Threads, not processes: both engines and numpy's loops leave the interpreter lock, `tokenizers` brings threads of its
    own, and nothing needs to be copied or forked. On 2 cores `tokenizers` gave 5.3 M tokens/s so, 5.7 in two processes.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque[Future[Out]]()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _write(file: FileIO, values: npt.NDArray[np.int32]) -> None:
    left = values.view(np.uint8).data
    while left:
        left = left[file.write(left) :]


def _spans(found: Tokens, document: int, cuts: Cuts, limit: int, repeated: int) -> list[tuple[int, int]]:
    """Which parts of a long document each fragment holds: as many of the pieces between cuts as fit.

    A piece that is too long by itself is a fragment of its own, which is then dropped. repeated: tokens of the head that a later
    fragment begins with; those of the gap, in the place of which it stands, are counted too, so a few tokens stay free.
    """
    lengths = found.part_lengths[found.part_offsets[document] : found.part_offsets[document + 1]].tolist()
    spans: list[tuple[int, int]] = []
    begin, size = 0, 0
    for first, end in pairwise([0, *cuts.parts, len(lengths)]):
        piece = sum(lengths[first:end])
        if first > begin and size + piece > limit:
            spans.append((begin, first))
            begin, size = first, repeated
        size += piece
    return [*spans, (begin, len(lengths))]


def _rows(parts: Any) -> list[list[str]]:
    borders = offsets_in(parts)
    texts = parts.values.slice(int(borders[0]), int(borders[-1] - borders[0])).to_pylist()
    starts = (borders - borders[0]).tolist()
    return [texts[a:b] for a, b in pairwise(starts)]
