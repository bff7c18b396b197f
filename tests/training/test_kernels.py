"""Checkpointed, tiled and compiled blocks compute what plain ones do.

Would catch: a share of blocks that is not the stated one or lies at one end, activations that are kept all the same, gradients
lost in a tile or in a recomputation, a compilation for every block, a setting that silently does nothing on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pipeline.config.errors import LaunchError  # noqa: E402 - after the check for torch
from pipeline.training import head, kernels  # noqa: E402
from pipeline.training.collate import PackedCollator  # noqa: E402
from pipeline.training.trainer import to_device  # noqa: E402
from tests.training.tiny import CAPACITY, Row, llama, model_of, uneven_rows  # noqa: E402

ROWS = uneven_rows(4)
LAYERS = 8


def batch_of(rows: list[Row], fixed_tokens: int | None = None) -> dict[str, Any]:
    batch = PackedCollator(longest=CAPACITY, fixed_tokens=fixed_tokens)(rows)
    named = ("input_ids", "position_ids", "targets", "supervised", "cu_seq_lens_q", "max_length_q")
    return {name: batch[name] for name in named}


def model(layers: int = LAYERS, attention: str = "sdpa") -> Any:
    made = model_of(llama(num_hidden_layers=layers), attention)
    head.install(made)
    return made.train()


def trained(made: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients."""
    loss = made(**batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in made.named_parameters()}


def assert_equal(made: Any, plain: Any, batch: dict[str, Any], gap: float) -> None:
    (loss, gradients), (expected, others) = trained(made, batch), trained(plain, batch)
    assert loss == pytest.approx(expected, rel=gap)
    assert gradients.keys() == others.keys()
    largest = max(float(g.abs().max()) for g in others.values())
    assert largest > 0.1
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).abs().max()) <= gap * largest, name


@pytest.mark.unit
@pytest.mark.parametrize(
    ("share", "chosen"),
    [(0.0, []), (0.25, [3, 7]), (0.5, [1, 3, 5, 7]), (0.75, [1, 2, 3, 5, 6, 7]), (1.0, list(range(8))), (0.1, [])],
)
def test_a_share_of_the_blocks_is_computed_again_and_changes_nothing(share: float, chosen: list[int]) -> None:
    """Counted by how often each block begins in one forward and backward pass; torch ends a second run once it has what it
    needs."""
    made, calls = model(), [0] * LAYERS
    kernels.checkpoint_activations(made, share)

    def counter(index: int) -> Any:
        def count(*_: Any) -> None:
            calls[index] += 1

        return count

    for index, block in enumerate(kernels.blocks(made)):
        block.input_layernorm.register_forward_pre_hook(counter(index))
    assert_equal(made, model(), batch_of(ROWS), gap=0.0)
    assert [index for index, count in enumerate(calls) if count == 2] == chosen
    assert set(calls) <= {1, 2}


@pytest.mark.unit
def test_the_blocks_are_the_longest_list_of_a_model() -> None:
    made = model(3)
    assert list(kernels.blocks(made)) == list(made.model.layers)
    made.model.towers = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    assert list(kernels.blocks(made)) == list(made.model.layers)


@pytest.mark.unit
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["kept", "recomputed"])
def test_a_tiled_mlp_computes_the_same(pieces: int, share: float) -> None:
    made, sizes = model(2), []
    kernels.tile_mlp(made, pieces)
    kernels.checkpoint_activations(made, share)
    made.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[-2]))
    batch = batch_of(ROWS)
    assert_equal(made, model(2), batch, gap=2e-6)
    total = batch["input_ids"].shape[1]
    assert max(sizes) == -(-total // pieces)


@pytest.mark.unit
def test_a_tiled_mlp_leaves_frozen_weights_alone() -> None:
    made, plain = model(2), model(2)
    kernels.tile_mlp(made, 2)
    for one in (made, plain):
        one.requires_grad_(False)
        one.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    loss, expected = made(**batch_of(ROWS)), plain(**batch_of(ROWS))
    loss.backward()
    expected.backward()
    found, right = (one.model.layers[0].self_attn.q_proj.weight.grad for one in (made, plain))
    assert float((found - right).abs().max()) <= 2e-6 * float(right.abs().max())
    assert all(p.grad is None for name, p in made.named_parameters() if "q_proj" not in name)


@pytest.mark.unit
def test_liger_is_refused_without_a_gpu_and_leaves_the_model_as_it_is() -> None:
    made = model(1)
    forward = type(made.model.layers[0].mlp).forward
    with pytest.raises(LaunchError, match=r"kernels: liger: .*needs a GPU; use kernels: plain"):
        kernels.use_kernels(made, "liger", zero=2, cuda=False)
    assert type(made.model.layers[0].mlp).forward is forward


@pytest.mark.unit
def test_plain_kernels_are_the_models_own() -> None:
    made = model(1)
    kernels.use_kernels(made, "plain", zero=2, cuda=False)
    assert "forward" not in vars(made.model.layers[0])


@pytest.mark.e2e
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["kept", "recomputed"])
def test_compiled_blocks_are_equal_and_share_one_compilation(share: float) -> None:
    """Three blocks, two batches of one filled size with different numbers of documents: one graph. A C++ compiler is needed."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    made, plain = model(3), model(3)
    kernels.use_kernels(made, "compiled", zero=2, cuda=False)
    kernels.checkpoint_activations(made, share)
    for rows in (ROWS, ROWS[:3]):
        batch = batch_of(rows, fixed_tokens=4 * CAPACITY)
        for one in (made, plain):
            one.zero_grad()
        assert_equal(made, plain, to_device(batch, torch.device("cpu"), compiled=True), gap=5e-6)
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    assert not counters["graph_break"]
