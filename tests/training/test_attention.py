"""Packed documents do not see each other, on the attention path that training uses.

Wrong behaviour these catch: a mask that lets a document read its neighbour; a packed loss that is not the documents' own;
positions that run through a pack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402 - after the check for torch

from pipeline.dataset.masking import IGNORED  # noqa: E402
from pipeline.training.attention import implementation  # noqa: E402
from pipeline.training.sft import PackedCollator  # noqa: E402

pytestmark = pytest.mark.unit

LENGTHS = (5, 1, 9, 4)


@pytest.fixture(scope="module")
def model(base_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32, attn_implementation=implementation()).eval()


def document(length: int, seed: int) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed(documents: list[list[int]]) -> dict[str, Any]:
    """One batch of two packs, as the ranks get it."""
    half = len(documents) // 2
    examples = [
        {
            "input_ids": [token for d in part for token in d],
            "labels": [token for d in part for token in d],
            "seq_lengths": [len(d) for d in part],
            "documents": list(range(len(part))),
        }
        for part in (documents[:half], documents[half:])
    ]
    batch = PackedCollator(pad_token_id=0, padding_free=True).torch_call(examples)
    batch.pop("documents")
    return batch


def logits(model: Any, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits[0]


def test_changing_one_document_never_moves_anothers_logits(model: Any) -> None:
    documents = [document(n, seed) for seed, n in enumerate(LENGTHS)]
    before = logits(model, packed(documents))
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    for changed in range(len(LENGTHS)):
        other = [document(len(d), 100) if i == changed else d for i, d in enumerate(documents)]
        gap = (logits(model, packed(other)) - before).abs().amax(dim=1)
        for index, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
            moved = float(gap[start : start + length].max())
            assert (moved > 1e-3) if index == changed else (moved == 0.0), (changed, index, moved)


def test_packed_loss_is_the_loss_of_the_documents_by_themselves(model: Any) -> None:
    documents = [document(n, 10 + seed) for seed, n in enumerate(LENGTHS)]
    batch = packed(documents)
    labels = batch["labels"][0, 1:]
    together = torch.nn.functional.cross_entropy(logits(model, batch)[:-1], labels, ignore_index=IGNORED, reduction="sum")
    alone = torch.tensor(0.0)
    for ids in documents:
        tensor = torch.tensor([ids])
        with torch.no_grad():
            rows = model(input_ids=tensor, use_cache=False).logits[0, :-1]
        alone += torch.nn.functional.cross_entropy(rows, tensor[0, 1:], reduction="sum")
    assert int((labels != IGNORED).sum()) == sum(n - 1 for n in LENGTHS)
    assert float(together) == pytest.approx(float(alone), rel=1e-5)
