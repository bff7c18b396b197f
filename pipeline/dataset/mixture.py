"""How much of each source is taken: caps and weights, chosen by content, so that neither order nor machine matters.

Contract: a row's lot is a number in [0, 1) made from its key and the seed. A cap takes the rows of a source with the lowest
lots. A weight of 2.3 takes a row twice, and once more if its lot is below 0.3; so what a lower weight takes, a higher
one takes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def lots(keys: Array, seed: int, purpose: int) -> Array:
    """(n,) float64 in [0, 1) from (n,) uint64 key hashes; another seed or purpose draws anew (splitmix64's finaliser)."""
    mixed = keys ^ np.uint64((seed * 0x9E3779B97F4A7C15 + purpose * 0xD1B54A32D192ED03) % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) / (1 << 53)


def within_limits(keys: Array, sources: Array, limits: Sequence[int | None], seed: int) -> Array:
    """Which rows their source's cap takes. sources: (n,) index into `limits`."""
    taken = np.ones(len(keys), dtype=bool)
    for source, limit in enumerate(limits):
        rows = np.flatnonzero(sources == source)
        if limit is not None and len(rows) > limit:
            order = np.argsort(lots(keys[rows], seed, 1), kind="stable")
            taken[rows[order[limit:]]] = False
    return taken


def copies(keys: Array, sources: Array, weights: Sequence[float], seed: int) -> Array:
    """(n,) int64: how often each row is taken under its source's weight."""
    weight = np.array(weights, dtype=np.float64)[sources] if len(sources) else np.zeros(0)
    whole = np.floor(weight)
    return (whole + (lots(keys, seed, 2) < weight - whole)).astype(np.int64)
