"""One global batch on any number of ranks, and one data order for all of them.

Contract: `global_batch = micro_batch x groups x accumulation`, or an error with the four numbers and the nearest that work; a
group is one rank, or the ranks that share a sequence. `DataOrder` is a pure function of (rows, seed, position): permutations of
the rows, pass after pass, without a gap, so that step s sees positions s * global_batch ... whatever the split into ranks, and
a resumed run continues where the position says.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.config.errors import LaunchError


def accumulation_for(global_batch: int, micro_batch: int, ranks: int) -> int:
    """Forward passes per optimizer step on each rank; LaunchError unless the global batch divides."""
    per_pass = micro_batch * ranks
    if global_batch % per_pass == 0:
        return global_batch // per_pass
    below, above = global_batch // per_pass * per_pass, -(-global_batch // per_pass) * per_pass
    batches = " or ".join(str(b) for b in (below, above) if b)
    fitting = [m for m in range(1, global_batch + 1) if global_batch % (m * ranks) == 0]
    other = f"micro_batch {min(fitting, key=lambda m: abs(m - micro_batch))}" if fitting else "fewer ranks"
    raise LaunchError(
        f"global_batch {global_batch} is not micro_batch {micro_batch} x ranks {ranks} x a whole accumulation "
        f"({global_batch / per_pass:.2f}); nearest that work: global_batch {batches}, or {other}"
    )


class GroupBatches:
    """The micro-batches of one group of ranks: each `groups`-th run of `micro_batch` positions of the data order, as torch's
    DataLoader wants a batch sampler. One optimizer step takes `accumulation` of them."""

    def __init__(self, order: DataOrder, micro_batch: int, group: int, groups: int) -> None:
        self._order, self._micro_batch, self._group, self._groups = order, micro_batch, group, groups

    def __len__(self) -> int:
        return len(self._order) // (self._micro_batch * self._groups)

    def __iter__(self) -> Iterator[list[int]]:
        pass_size, start = self._micro_batch * self._groups, self._micro_batch * self._group
        one_pass: list[int] = []
        for row in self._order:
            one_pass.append(row)
            if len(one_pass) == pass_size:
                yield one_pass[start : start + self._micro_batch]
                one_pass = []


def steps_for(rows: int, epochs: int, global_batch: int) -> int:
    """Optimizer steps of `epochs` passes; the last step is filled from the next pass."""
    return -(-rows * epochs // global_batch)


class DataOrder:
    """Row numbers for the first `total` positions; iterable, with a length, as torch's DataLoader wants a sampler."""

    def __init__(self, rows: int, seed: int, total: int) -> None:
        self._rows, self._seed, self._total = rows, seed, total

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._total, self._rows):
            order = np.random.default_rng([self._seed, start // self._rows]).permutation(self._rows)
            yield from order[: self._total - start].tolist()
