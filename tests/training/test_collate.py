"""Packed rows to a batch, against documents written out one by one.

Would catch: a token that is asked to predict the next document, positions that run through a row, a supervised token lost at a
seam between sequences, bounds that miss the filling, filling that is trained on, ranks whose shares do not make up the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline.dataset.masking import IGNORED  # noqa: E402 - after the check for torch
from pipeline.training.collate import PackedCollator  # noqa: E402
from tests.training.tiny import CAPACITY, Row, documents_of, row  # noqa: E402

pytestmark = pytest.mark.unit


def random_rows(seed: int) -> list[Row]:
    """One to five sequences of one to six documents of 1 to 8 tokens, of each some, none or all supervised."""
    draw = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(draw.integers(1, 6)):
        lengths = draw.integers(1, 9, draw.integers(1, 7)).tolist()
        supervised = [int(draw.integers(0, length + 1)) for length in lengths]
        rows.append(row(draw, lengths, supervised, first_document=10 * number))
    return rows


def collated(rows: list[Row], fixed_tokens: int | None = None, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    return PackedCollator(longest=CAPACITY, fixed_tokens=fixed_tokens, share=share)(rows)


def expected(rows: list[Row]) -> tuple[list[int], list[int], list[int], list[int]]:
    """ids, positions, targets and bounds, document by document."""
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    bounds = [0]
    for tokens, labels in documents_of(rows):
        ids += tokens.tolist()
        positions += range(len(tokens))
        targets += [*labels[1:].tolist(), IGNORED]
        bounds.append(len(ids))
    return ids, positions, targets, bounds


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_its_documents_end_to_end(seed: int) -> None:
    rows = random_rows(seed)
    batch, (ids, positions, targets, bounds) = collated(rows), expected(rows)
    assert batch["input_ids"].tolist() == [ids]
    assert batch["position_ids"].tolist() == [positions]
    assert batch["targets"].tolist() == targets
    assert batch["cu_seq_lens_q"].tolist() == bounds
    assert batch["supervised"].tolist() == [i for i, target in enumerate(targets) if target != IGNORED]
    assert batch["documents"] == [d for r in rows for d in r["documents"].tolist()]
    lengths = np.diff(bounds)
    assert (batch["tokens"], batch["attended"]) == (len(ids), sum(sum(range(1, n + 1)) for n in lengths))
    assert batch["max_length_q"] >= lengths.max()
    kinds = {name: batch[name].dtype for name in ("input_ids", "position_ids", "targets", "supervised", "cu_seq_lens_q")}
    assert kinds == {name: torch.int32 if name == "cu_seq_lens_q" else torch.int64 for name in kinds}


def test_the_first_token_of_a_document_is_no_target_even_if_it_is_labelled() -> None:
    """All tokens labelled: 4 documents of 3 tokens give 2 targets each, at a seam inside a row and between rows alike."""
    draw = np.random.default_rng(0)
    rows = [row(draw, [3, 3], [3, 3], 0), row(draw, [3, 3], [3, 3], 2)]
    ids = [token for r in rows for token in r["input_ids"].tolist()]
    expected_targets = [ids[i + 1] if i % 3 < 2 else IGNORED for i in range(12)]
    assert collated(rows)["targets"].tolist() == expected_targets


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("room", [0, 1, 37])
def test_filling_is_one_document_that_trains_nothing(seed: int, room: int) -> None:
    rows = random_rows(seed)
    plain = collated(rows)
    total = plain["input_ids"].shape[1]
    filled = collated(rows, fixed_tokens=total + room)
    assert filled["input_ids"].shape == filled["position_ids"].shape == (1, total + room)
    assert filled["targets"].tolist() == plain["targets"].tolist() + [IGNORED] * room
    assert filled["supervised"].tolist() == plain["supervised"].tolist()
    assert filled["cu_seq_lens_q"].tolist() == plain["cu_seq_lens_q"].tolist() + ([total + room] if room else [])
    assert filled["position_ids"][0, total:].tolist() == list(range(room))
    assert filled["max_length_q"] >= room
    assert [filled[name] for name in ("documents", "tokens", "attended")] == [
        plain[name] for name in ("documents", "tokens", "attended")
    ]


def test_filling_longer_than_any_document_counts_as_the_longest() -> None:
    rows = [row(np.random.default_rng(0), [4], [2], 0)]
    assert collated(rows, fixed_tokens=5 * CAPACITY)["max_length_q"] == 5 * CAPACITY - 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_shares_of_several_ranks_make_up_the_row(seed: int, count: int) -> None:
    rows = random_rows(seed)
    total = collated(rows)["input_ids"].shape[1]
    whole = collated(rows, fixed_tokens=-(-total // count) * count)
    parts = [collated(rows, share=(index, count)) for index in range(count)]
    width = whole["input_ids"].shape[1] // count
    assert {part["input_ids"].shape for part in parts} == {(1, width)}
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), whole[name])
    assert torch.equal(torch.cat([part["targets"] for part in parts]), whole["targets"])
    positions = [index * width + position for index, part in enumerate(parts) for position in part["supervised"].tolist()]
    assert positions == whole["supervised"].tolist()
    for part in parts:  # attention sees the whole row, and the row counts once
        assert torch.equal(part["cu_seq_lens_q"], whole["cu_seq_lens_q"])
        assert part["max_length_q"] == whole["max_length_q"]
    assert sum(part["tokens"] for part in parts) == total
    assert sum(part["attended"] for part in parts) == whole["attended"]
