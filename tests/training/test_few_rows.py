"""Few rows and many: 1, 7 and 100 documents, packed as `pack` packs them, on one and two ranks.

Would catch: a run that never ends or ends at once when there are fewer sequences than a global batch holds, ranks that wait for a
batch the other does not have, a pass that leaves out or repeats a document.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")

from pipeline.dataset.packing import best_fit_decreasing  # noqa: E402 - after the check for torch
from pipeline.training.batching import steps_for  # noqa: E402
from tests.training.tiny import CAPACITY, Row, Set, Trained, row, train_all, write_model, write_packed  # noqa: E402

pytestmark = pytest.mark.e2e

COUNTS, EPOCHS, GLOBAL_BATCH = (1, 7, 100), 2, 4


def packed_rows(documents: int) -> list[Row]:
    draw = np.random.default_rng(documents)
    lengths = draw.integers(2, CAPACITY // 2, documents)
    packing = best_fit_decreasing(lengths, CAPACITY)
    rows: list[Row] = []
    for index in range(packing.sequences):
        inside = packing.documents[packing.offsets[index] : packing.offsets[index + 1]]
        sizes = lengths[inside].tolist()
        rows.append({**row(draw, sizes, [size - 1 for size in sizes], 0), "documents": inside.astype(np.int32)})
    return rows


@pytest.fixture(scope="module")
def sequences() -> dict[int, list[Row]]:
    return {count: packed_rows(count) for count in COUNTS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, sequences: dict[int, list[Row]]) -> dict[tuple[int, int], Trained]:
    """Runs by (documents, ranks)."""
    made = Set(tmp_path_factory.mktemp("rows"), [])
    write_model(made.model)
    found: dict[tuple[int, int], Trained] = {}
    for count, rows in sequences.items():
        write_packed(made.folder / f"packed-{count}", rows)
    for ranks in (1, 2):
        specs = {
            str(count): made.spec(
                f"{count}-{ranks}",
                steps=steps_for(len(rows), EPOCHS, GLOBAL_BATCH),
                params={"global_batch": GLOBAL_BATCH},
                machine={"ranks": ranks, "micro_batch": 2 // ranks},
                packed=f"packed-{count}",
            )
            for count, rows in sequences.items()
        }
        found |= {(int(name), ranks): run for name, run in train_all(made.folder, specs).items()}
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", COUNTS)
def test_training_ends_and_each_pass_sees_each_document(
    count: int, ranks: int, trained: dict[tuple[int, int], Trained], sequences: dict[int, list[Row]]
) -> None:
    run, rows = trained[count, ranks], len(sequences[count])
    steps = math.ceil(EPOCHS * rows / GLOBAL_BATCH)
    assert run.result["outcome"] == "finished"
    assert run.column("step") == list(range(1, steps + 1))
    assert all(math.isfinite(loss) for loss in run.column("loss"))
    assert run.result["eval_loss"] is None
    seen: Counter[int] = Counter()
    for step in range(1, steps + 1):
        seen.update(document for rank in run.seen for document in rank[step - 1])
        passes, rest = divmod(step * GLOBAL_BATCH, rows)
        counts = {seen[document] for document in range(count)}
        assert counts <= {passes, passes + bool(rest)}, (step, seen)
    assert set(seen) == set(range(count))
    assert min(seen.values()) >= EPOCHS


@pytest.mark.parametrize("count", COUNTS)
def test_two_ranks_see_what_one_sees(count: int, trained: dict[tuple[int, int], Trained]) -> None:
    one, two = trained[count, 1], trained[count, 2]
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
