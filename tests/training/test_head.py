"""The fused head against plain cross-entropy over the documents, one by one: loss and the gradient of every weight.

Would catch: a tile that is skipped or counted twice, a gradient that ignores what the loss is multiplied by, tied weights that
only one of their two gradients, a frozen head that is given one, logits that a family scales or caps and we do not, a head
replaced where nobody trains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402 - after the check for torch
from peft import LoraConfig, get_peft_model  # noqa: E402

from pipeline.training import head  # noqa: E402
from pipeline.training.collate import PackedCollator  # noqa: E402
from tests.training.tiny import CAPACITY, VOCABULARY, Row, llama, model_of, plain_loss, row, uneven_rows  # noqa: E402

pytestmark = pytest.mark.unit

ROWS = uneven_rows(6)
UPSTREAM = 0.37
"""What the loss is multiplied by, as the trainer does for the global batch."""

LOSS, GRADIENT = 1e-6, 1e-5

BYTES_PER_ROW = 4 * VOCABULARY


def batch_of(rows: list[Row]) -> dict[str, Any]:
    batch = PackedCollator(longest=CAPACITY, fixed_tokens=None)(rows)
    return {name: batch[name] for name in ("input_ids", "position_ids", "targets", "supervised", "cu_seq_lens_q", "max_length_q")}


SUPERVISED = len(batch_of(ROWS)["supervised"])


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.clone() if p.grad is not None else None for name, p in model.named_parameters()}


def assert_as_plain(model: Any, installed_on: Any = None, rows: list[Row] = ROWS) -> None:
    """Loss and gradients of a model before and after `install`."""
    expected, count = plain_loss(model, rows)
    (expected * UPSTREAM).backward()
    plain = gradients(model)
    model.zero_grad(set_to_none=True)
    head.install(installed_on if installed_on is not None else model)
    found = model(**batch_of(rows))
    assert found.dtype == torch.float32
    assert found.shape == ()
    (found * UPSTREAM).backward()
    assert count == len(batch_of(rows)["supervised"])
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=LOSS)
    made = gradients(model)
    assert {n for n, g in made.items() if g is None} == {n for n, g in plain.items() if g is None}
    largest = max(float(g.abs().max()) for g in plain.values() if g is not None)
    assert largest > 0.1
    gaps = {n: float((g - made[n]).abs().max()) / largest for n, g in plain.items() if g is not None}
    assert max(gaps.values()) < GRADIENT, max(gaps.items(), key=lambda item: item[1])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tile", [1, 7, SUPERVISED - 1, SUPERVISED, 10 * SUPERVISED], ids=lambda t: f"{t}-of-{SUPERVISED}")
def test_any_tile_size_gives_the_plain_loss_and_gradients(tile: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "TILE_BYTES", tile * BYTES_PER_ROW)
    assert_as_plain(model_of(llama(tie_word_embeddings=tied)))


def test_a_tile_smaller_than_one_row_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "TILE_BYTES", 1)
    assert_as_plain(model_of(llama()), rows=ROWS[:1])


def test_a_frozen_head_gets_no_gradient() -> None:
    model = model_of(llama(tie_word_embeddings=False))
    model.lm_head.weight.requires_grad_(False)
    assert_as_plain(model)
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad is not None


def test_a_head_alone_can_be_trained() -> None:
    model = model_of(llama(tie_word_embeddings=False))
    model.model.requires_grad_(False)
    assert_as_plain(model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_without_a_supervised_token_give_zero_and_gradients_of_zero(tied: bool) -> None:
    """A rank may draw such a micro-batch, and must take part in the backward pass all the same."""
    model = model_of(llama(tie_word_embeddings=tied))
    head.install(model)
    loss = model(**batch_of([row(np.random.default_rng(0), [5, 3], [0, 1], 0)]))  # the one label is no target: see collate.py
    model.zero_grad(set_to_none=True)
    empty = model(**batch_of([row(np.random.default_rng(0), [5, 3], [0, 0], 0)]))
    empty.backward()
    assert float(loss.detach()) > 0.0
    assert float(empty.detach()) == 0.0
    made = gradients(model)
    assert all(g is not None and not g.any() for g in made.values()), [n for n, g in made.items() if g is None or g.any()]


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3TextConfig": {"final_logit_softcapping": 2.0, "head_dim": 16},  # capped
    "CohereConfig": {"logit_scale": 0.3},  # multiplied
    "GraniteConfig": {"logits_scaling": 3.0},  # divided
    "HyperCLOVAXConfig": {"logits_scaling": 3.0},  # multiplied by what bears Granite's name
    "FalconH1Config": {"lm_head_multiplier": 0.4, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},  # multiplied
    "PhiConfig": {},  # a head with a bias
    "Qwen3Config": {"head_dim": 16},  # nothing of the kind
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_scaled_and_capped_as_the_family_does(family: str) -> None:
    """On one document: the state of Falcon-H1's recurrent layers would run on into a second."""
    if not hasattr(transformers, family):
        pytest.skip(f"this version of transformers has no {family}")
    config = getattr(transformers, family)(**SMALL | FAMILIES[family])
    model = model_of(config)
    if family == "PhiConfig":
        torch.nn.init.normal_(model.lm_head.bias)
    assert_as_plain(model.eval(), rows=[row(np.random.default_rng(0), [20], [15], 0)])  # Phi has dropout


def test_it_works_beneath_adapters() -> None:
    torch.manual_seed(0)
    adapted: Any = get_peft_model(model_of(llama()), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # zero at first, and then lora_A has no gradient
    assert_as_plain(adapted, installed_on=adapted.get_base_model())


def test_adapters_on_the_head_are_part_of_it() -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model_of(llama(tie_word_embeddings=False)), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert_as_plain(adapted, installed_on=adapted.get_base_model())
    assert any("lm_head.lora_A" in name and p.grad is not None for name, p in adapted.named_parameters())


def test_without_gradients_the_loss_is_the_same() -> None:
    model = model_of(llama())
    head.install(model)
    trained = model(**batch_of(ROWS))
    with torch.no_grad():
        held_out = model(**batch_of(ROWS))
    assert not held_out.requires_grad
    assert float(held_out) == pytest.approx(float(trained.detach()), rel=LOSS)


def test_under_autocast_it_is_as_near_as_the_plain_head() -> None:
    """16-bit products, fp32 loss: to the rounding of bf16, one part in 256."""
    model = model_of(llama())
    exact, _ = plain_loss(model, ROWS)
    head.install(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_of(ROWS))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=2**-7)
    assert model.get_output_embeddings().weight.grad.dtype == torch.float32


def test_logits_and_generation_stay_what_they_were() -> None:
    plain, installed = model_of(llama()).eval(), model_of(llama()).eval()
    head.install(installed)
    ids = torch.tensor([ROWS[0]["input_ids"][:12].tolist()])
    with torch.no_grad():
        assert torch.equal(installed(input_ids=ids).logits, plain(input_ids=ids).logits)
        labelled = installed(input_ids=ids, labels=ids)
        assert torch.equal(labelled.loss, plain(input_ids=ids, labels=ids).loss)
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(installed.generate(ids, **options), plain.generate(ids, **options))
