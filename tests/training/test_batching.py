"""Global batch and data order.

Would catch: another global batch on another number of ranks, rows skipped or seen twice in a pass, an order that depends
on the split into ranks or on where a run was resumed.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pipeline.config.errors import LaunchError
from pipeline.training.batching import DataOrder, accumulation_for, steps_for

pytestmark = pytest.mark.unit


def test_accumulation_makes_up_the_rest() -> None:
    for global_batch in range(1, 65):
        for micro_batch in (1, 2, 3, 4, 8):
            for ranks in (1, 2, 3, 8):
                if global_batch % (micro_batch * ranks) == 0:
                    assert accumulation_for(global_batch, micro_batch, ranks) * micro_batch * ranks == global_batch
                else:
                    with pytest.raises(LaunchError):
                        accumulation_for(global_batch, micro_batch, ranks)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((10, 2, 2), ["global_batch 10", "micro_batch 2", "ranks 2", "(2.50)", "global_batch 8 or 12", "micro_batch 1"]),
        ((4, 1, 8), ["global_batch 8", "fewer ranks"]),
        ((12, 4, 2), ["global_batch 8 or 16", "micro_batch 3"]),
        ((7, 4, 1), ["global_batch 4 or 8", "or micro_batch 1"]),
    ],
)
def test_the_error_names_the_numbers_and_what_would_work(numbers: tuple[int, int, int], said: list[str]) -> None:
    global_batch, micro_batch, ranks = numbers
    with pytest.raises(LaunchError) as caught:
        accumulation_for(global_batch, micro_batch, ranks)
    message = str(caught.value)
    assert [s for s in said if s not in message] == [], message
    for batch in re.findall(r"\d+", re.search(r"work: global_batch ([\d or]+)", message)[1]):  # pyright: ignore[reportOptionalSubscript]
        assert accumulation_for(int(batch), micro_batch, ranks) >= 1
    if advised := re.search(r", or micro_batch (\d+)", message):
        assert accumulation_for(global_batch, int(advised[1]), ranks) >= 1


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "steps"), [(10, 1, 5, 2), (10, 1, 4, 3), (10, 2, 4, 5), (3, 1, 8, 1), (3, 5, 8, 2), (1, 1, 1, 1)]
)
def test_steps_cover_every_pass(rows: int, epochs: int, batch: int, steps: int) -> None:
    assert steps_for(rows, epochs, batch) == steps
    assert (steps - 1) * batch < rows * epochs <= steps * batch


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_each_pass_covers_each_row_once(rows: int, seed: int) -> None:
    order = list(DataOrder(rows, seed, rows * 5))
    for start in range(0, rows * 5, rows):
        assert sorted(order[start : start + rows]) == list(range(rows))


@pytest.mark.parametrize(("rows", "total"), [(7, 0), (7, 3), (7, 7), (7, 20), (1, 5), (3, 100)])
def test_length_is_what_is_given(rows: int, total: int) -> None:
    """A set shorter than a batch is filled from the next passes, evenly."""
    order = list(DataOrder(rows, 1, total))
    assert len(order) == total == len(DataOrder(rows, 1, total))
    counts = Counter(order)
    assert sum(counts.values()) == total
    assert max(counts.values(), default=0) - min((counts[r] for r in range(rows)), default=0) <= 1


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    """Position decides: a run that is resumed, or has more steps, sees the same rows up to there."""
    whole = list(DataOrder(13, 5, 200))
    for total in (1, 12, 13, 14, 100):
        assert list(DataOrder(13, 5, total)) == whole[:total]
    assert list(DataOrder(13, 5, 200)) == whole


def test_passes_and_seeds_differ() -> None:
    order = list(DataOrder(50, 1, 150))
    assert order[:50] != order[50:100] != order[100:]
    assert order[:50] != list(range(50))
    assert order != list(DataOrder(50, 2, 150))


def test_the_order_is_fixed_for_good() -> None:
    """A checkpoint of an earlier version is continued only if this holds."""
    assert list(DataOrder(8, 1, 16)) == [5, 0, 1, 4, 2, 6, 3, 7, 6, 1, 4, 0, 3, 2, 5, 7]


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 1), (1, 2), (2, 2), (4, 1), (1, 4), (1, 8), (8, 1)])
def test_a_step_sees_the_same_rows_whatever_the_split(micro_batch: int, ranks: int) -> None:
    """Dealt out as a distributed loader does, batch by batch to the ranks in turn, and gathered step by step."""
    global_batch, steps = 8, 6
    order = list(DataOrder(11, 3, global_batch * steps))
    accumulation = accumulation_for(global_batch, micro_batch, ranks)
    batches = [order[i : i + micro_batch] for i in range(0, len(order), micro_batch)]
    by_rank = [batches[rank::ranks] for rank in range(ranks)]
    for step in range(steps):
        seen = [row for own in by_rank for batch in own[step * accumulation : (step + 1) * accumulation] for row in batch]
        assert sorted(seen) == sorted(order[step * global_batch : (step + 1) * global_batch])
