"""The limit on the gradient's norm.

Would catch: a limit before the window is full, one that a spike or a NaN drags up, one above max_norm, a state that a checkpoint
does not bring back whole.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from pipeline.config.errors import DataError  # noqa: E402 - after the check for torch
from pipeline.config.params import AdaptiveClipping, FixedClipping  # noqa: E402
from pipeline.training.clipping import STATE, AdaptiveLimit, FixedLimit, limit_of  # noqa: E402

pytestmark = pytest.mark.unit


def adaptive(window: int = 5, deviations: float = 2.0, max_norm: float = 100.0) -> AdaptiveLimit:
    return AdaptiveLimit(AdaptiveClipping(kind="adaptive", max_norm=max_norm, window=window, deviations=deviations))


def calm(count: int, seed: int = 0) -> list[float]:
    """Norms around 1 that spread by a tenth."""
    return np.exp(np.random.default_rng(seed).normal(0.0, 0.1, count)).tolist()


def shown(limit: AdaptiveLimit, norms: list[float]) -> list[float]:
    """The limit of each step, as the norms come in."""
    limits: list[float] = []
    for norm in norms:
        limits.append(limit.limit)
        limit.observe(norm)
    return limits


def test_the_kind_of_the_section_decides() -> None:
    fixed = limit_of(FixedClipping(kind="fixed", max_norm=0.7))
    assert isinstance(fixed, FixedLimit)
    fixed.observe(1e9)
    assert fixed.limit == 0.7
    section = AdaptiveClipping(kind="adaptive", max_norm=0.7, window=3, deviations=1.0)
    assert isinstance(limit_of(section), AdaptiveLimit)


@pytest.mark.parametrize("window", [2, 5, 20])
def test_only_max_norm_holds_until_the_window_is_full(window: int) -> None:
    limits = shown(adaptive(window), calm(window + 1))
    assert limits[:window] == [100.0] * window
    assert limits[window] < 2.0


def test_after_the_window_it_is_mean_and_deviation_of_the_logarithms() -> None:
    """While it fills every norm weighs the same, unless 2 / (window + 1) is more: from the third on, with a window of 5."""
    limit = adaptive(window=5, deviations=1.5)
    norms = [1.0, 2.0, 4.0, 1.0, 2.0, 8.0, 1.0]
    mean = variance = 0.0
    for number, norm in enumerate(norms):
        expected = math.exp(mean + 1.5 * math.sqrt(variance)) if number >= 5 else 100.0
        assert limit.limit == pytest.approx(expected, rel=1e-12)
        value = math.log(min(norm, expected))
        weights = [1.0, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
        weight = weights[number]
        # E[x^2] - E[x]^2 of the weighted sample, the textbook form
        second = (1 - weight) * (variance + mean**2) + weight * value**2
        mean = (1 - weight) * mean + weight * value
        variance = second - mean**2
        limit.observe(norm)


def test_a_calm_run_is_seldom_touched_and_a_spike_always() -> None:
    limit = adaptive(window=50, deviations=3.0)
    norms = calm(2000)
    limits = shown(limit, norms)
    touched = [norm > bound for norm, bound in zip(norms[50:], limits[50:], strict=True)]
    assert sum(touched) / len(touched) < 0.02
    assert limit.limit < 3.0


def test_a_spike_raises_the_limit_no_more_than_a_norm_at_the_limit() -> None:
    one, other = adaptive(), adaptive()
    for limit in (one, other):
        shown(limit, calm(30))
    before = one.limit
    one.observe(1e6)
    other.observe(before)
    assert one.limit == other.limit
    assert one.limit < 1.5 * before


def test_it_follows_a_run_whose_norms_fall() -> None:
    limit = adaptive(window=10)
    shown(limit, calm(50))
    shown(limit, [norm / 10 for norm in calm(50, seed=1)])
    assert 0.1 < limit.limit < 0.2


def test_norms_that_are_no_numbers_or_zero_are_left_out() -> None:
    one, other = adaptive(window=4), adaptive(window=4)
    norms = calm(20)
    shown(one, norms)
    for norm in norms:
        for nothing in (math.nan, math.inf, -math.inf, 0.0):
            other.observe(nothing)
        other.observe(norm)
    assert other.limit == one.limit
    assert math.isfinite(one.limit)
    fresh = adaptive(window=2)
    for _ in range(5):
        fresh.observe(math.nan)
    assert fresh.limit == 100.0


@pytest.mark.parametrize("seed", range(5))
def test_it_never_exceeds_max_norm(seed: int) -> None:
    norms = np.exp(np.random.default_rng(seed).normal(0.0, 3.0, 300)).tolist()
    limits = shown(adaptive(window=3, deviations=4.0, max_norm=2.5), norms)
    assert max(limits) == 2.5
    assert min(limits) > 0.0


@pytest.mark.parametrize("at", [0, 2, 5, 17])
def test_a_resumed_run_has_the_limits_of_the_straight_one(at: int, tmp_path: Path) -> None:
    norms = calm(40)
    straight = shown(adaptive(), norms)
    first, second = adaptive(), adaptive()
    shown(first, norms[:at])
    first.save(tmp_path)
    second.load(tmp_path)
    assert shown(second, norms[at:]) == straight[at:]  # to the last bit


def test_a_checkpoint_without_the_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{STATE}: the state of adaptive clipping is missing"):
        adaptive().load(tmp_path)


def test_a_fixed_limit_keeps_no_state(tmp_path: Path) -> None:
    fixed = limit_of(FixedClipping(kind="fixed", max_norm=1.0))
    fixed.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    fixed.load(tmp_path)
