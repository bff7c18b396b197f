"""Rows that say nearly the same, and passages that two rows share: by characters, so that Chinese counts as English does.

Contract: what is found depends on the texts and their order alone, not on machine, process or batch size. Letter case and
white space do not count. `Signatures` holds 512 bytes a row on disk; `near_duplicates` maps them. `Passages` holds 8 bytes
for each character of the held-out texts in memory.

MinHash is rensa's (`RMinHash`, 128 permutations); windows of characters are hashed here, a whole batch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rensa as _rensa  # pyright: ignore[reportMissingTypeStubs] - ships no types

rensa: Any = _rensa

_PERMUTATIONS = 128
_SEED = 1
_RECALL = 0.99
"""Least share of pairs at the threshold that the bands bring together."""

_U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 24

Array = np.ndarray[Any, Any]


def normal(text: str) -> str:
    """The form in which texts are compared."""
    return " ".join(text.casefold().split())


def window_hashes(texts: Sequence[str], width: int) -> tuple[Array, Array]:
    """Hashes of all windows of `width` characters, text after text, and (len(texts) + 1,) offsets into them.

    A text shorter than a window is one window, filled up with NUL. With prefix sums S of x_i B^i modulo 2^64, the hash of
    the window at i is (S[i + width] - S[i]) / B^i: B is odd, so it has an inverse. A multiply-shift round mixes the bits.
    """
    padded = [text.ljust(width, "\0") for text in texts]
    counts = np.array([len(text) - width + 1 for text in padded], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    if not padded:
        return np.zeros(0, dtype=_U64), offsets
    codes = np.frombuffer("".join(padded).encode("utf-32-le"), dtype=np.uint32).astype(_U64) + _U64(1)
    powers = _powers(_BASE, len(codes))
    sums = np.concatenate([np.zeros(1, dtype=_U64), np.cumsum(codes * powers)])
    hashes = (sums[width:] - sums[:-width]) * _powers(_INVERSE, len(codes))[: len(codes) - width + 1]
    starts = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), counts[:-1] + width - 1]))
    hashes = hashes[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)]
    hashes ^= hashes >> _U64(32)
    hashes *= _U64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> _U64(32)
    return hashes, offsets


def _powers(base: int, count: int) -> Array:
    """1, base, base^2, ... modulo 2^64."""
    powers = np.full(count, base, dtype=_U64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def signatures(texts: Sequence[str], shingle: int) -> Array:
    """(texts, 128) MinHash signatures over shingles of so many characters."""
    if not texts:
        return np.zeros((0, _PERMUTATIONS), dtype=np.uint32)
    hashes, offsets = window_hashes([normal(text) for text in texts], shingle)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets.astype(_U64), _PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32)


class Signatures:
    """MinHash signatures of rows, in a file as long as it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")

    def add(self, rows: Array) -> None:
        """More rows, as `signatures` gives them."""
        rows.astype("<u4").tofile(self._file)

    def near_duplicates(self, threshold: float) -> Array:
        """For each row the earlier row that it nearly repeats, or itself; whoever is repeated is not a repetition itself.

        Rows are brought together by bands of equal signature (each with the first and the row before in its band), then
        compared by the share of equal values.
        """
        self._file.close()
        count = self._path.stat().st_size // (4 * _PERMUTATIONS)
        kept: list[int] = list(range(count))
        if count:
            signatures: Array = np.memmap(self._path, dtype="<u4", mode="r", shape=(count, _PERMUTATIONS))
            width = _band_width(threshold)
            pairs = {p for start in range(0, _PERMUTATIONS, width) for p in _pairs(signatures, start, width, threshold)}
            for later, earlier in sorted(pairs):
                target = kept[earlier]
                if kept[later] == later and (target == earlier or _alike(signatures, later, target, threshold)):
                    kept[later] = target
        return np.array(kept, dtype=np.int64)

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()


def _band_width(threshold: float) -> int:
    """The widest bands that bring a pair at the threshold together with probability _RECALL."""
    for width in (32, 16, 8, 4, 2):
        if 1 - (1 - threshold**width) ** (_PERMUTATIONS // width) >= _RECALL:
            return width
    return 1


def _pairs(signatures: Array, start: int, width: int, threshold: float) -> list[tuple[int, int]]:
    """Pairs (later, earlier) of rows that agree in one band and are alike."""
    band = np.zeros(len(signatures), dtype=_U64)
    for column in range(start, start + width):
        band = (band ^ signatures[:, column].astype(_U64)) * _U64(0x9FB21C651E98DF25)
        band ^= band >> _U64(29)
    order = np.argsort(band, kind="stable")
    same = np.concatenate([np.zeros(1, dtype=bool), band[order][1:] == band[order][:-1]])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    found: list[tuple[int, int]] = []
    later = order[same]
    for earlier in (order[first[same]], order[np.flatnonzero(same) - 1]):
        for at in range(0, len(later), 4096):
            a, b = later[at : at + 4096], earlier[at : at + 4096]
            alike = (signatures[a] == signatures[b]).mean(axis=1) >= threshold
            found += zip(a[alike].tolist(), b[alike].tolist(), strict=True)
    return found


def _alike(signatures: Array, a: int, b: int, threshold: float) -> bool:
    return float((signatures[a] == signatures[b]).mean()) >= threshold


class Passages:
    """Runs of `width` characters of some texts, to find others that share one."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._found: list[Array] = []
        self._sorted = np.zeros(0, dtype=_U64)
        self._table = np.zeros(1 << _TABLE_BITS, dtype=bool)

    def add(self, texts: Sequence[str]) -> None:
        self._found.append(np.unique(self._windows(texts)[0]))

    def close(self) -> None:
        """No more texts to add; the table tells most windows apart without a search."""
        self._sorted = np.unique(np.concatenate(self._found)) if self._found else self._sorted
        self._found = []
        self._table[self._sorted >> _U64(64 - _TABLE_BITS)] = True

    def shared(self, texts: Sequence[str]) -> Array:
        """Whether each text shares a run with what was added."""
        hashes, offsets = self._windows(texts)
        hits = np.flatnonzero(self._table[hashes >> _U64(64 - _TABLE_BITS)])
        if len(self._sorted):
            places = np.minimum(np.searchsorted(self._sorted, hashes[hits]), len(self._sorted) - 1)
            hits = hits[self._sorted[places] == hashes[hits]]
        found = np.zeros(len(texts), dtype=bool)
        found[np.searchsorted(offsets, hits, side="right") - 1] = True
        return found

    def _windows(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """As window_hashes, but a text shorter than a run has none."""
        texts = [normal(text) for text in texts]
        long = [text for text in texts if len(text) >= self._width]
        hashes, _ = window_hashes(long, self._width)
        counts = [max(0, len(text) - self._width + 1) for text in texts]
        return hashes, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
