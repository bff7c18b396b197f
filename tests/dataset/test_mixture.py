"""Caps and weights of sources.

Would catch: a mixture that depends on the order of rows, a weight that takes other rows than a lower one, a cap that another
source's rows count towards, a share that is off.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipeline.dataset.mixture import copies, lots, within_limits

pytestmark = pytest.mark.unit

KEYS = np.random.default_rng(1).integers(0, 1 << 63, 20_000, dtype=np.uint64)
ONE = np.zeros(len(KEYS), dtype=np.uint16)


def test_lots_are_even_and_draw_anew_for_another_seed_or_purpose() -> None:
    drawn = [lots(KEYS, seed, purpose) for seed, purpose in ((7, 1), (8, 1), (7, 2), (-7, 1))]
    for one in drawn:
        assert 0 <= one.min() < one.max() < 1
        assert np.abs(np.histogram(one, 10, (0, 1))[0] - 2000).max() < 200
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.03 for a, b in itertools.pairwise(drawn))


def test_lots_of_close_keys_are_unrelated() -> None:
    drawn = lots(np.arange(10_000, dtype=np.uint64), 7, 1)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0, 1.5, 2.0, 3.25])
def test_a_weight_takes_its_share(weight: float) -> None:
    taken = copies(KEYS, ONE, [weight], 7)
    assert set(taken.tolist()) <= {int(weight), int(weight) + 1}
    assert abs(taken.mean() - weight) < 4 * (0.25 / len(KEYS)) ** 0.5
    assert (copies(KEYS, ONE, [weight + 0.1], 7) >= taken).all()
    order = np.argsort(KEYS)
    assert (copies(KEYS[order], ONE, [weight], 7) == taken[order]).all()


def test_weights_and_caps_are_each_source_s_own() -> None:
    sources = np.arange(len(KEYS)).astype(np.uint16) % 3
    taken = copies(KEYS, sources, [1.0, 2.0, 0.5], 7)
    assert set(taken[sources == 0].tolist()) == {1}
    assert set(taken[sources == 1].tolist()) == {2}
    assert set(taken[sources == 2].tolist()) == {0, 1}
    within = within_limits(KEYS, sources, [None, 10, 10**9], 7)
    assert [int(within[sources == s].sum()) for s in range(3)] == [int((sources == 0).sum()), 10, int((sources == 2).sum())]


def test_a_cap_takes_the_same_rows_in_any_order_and_fewer_of_them_when_lower() -> None:
    within = within_limits(KEYS, ONE, [500], 7)
    order = np.argsort(KEYS)
    assert (within_limits(KEYS[order], ONE, [500], 7) == within[order]).all()
    assert not (within_limits(KEYS, ONE, [400], 7) & ~within).any()
    assert (within_limits(KEYS, ONE, [500], 8) != within).any()


def test_no_rows() -> None:
    empty, none = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint16)
    assert within_limits(empty, none, [3], 7).tolist() == []
    assert copies(empty, none, [0.5], 7).tolist() == []
