"""Adapters, quantised bases and expert blocks: what is rendered, and what is refused by name.

Would catch: a target that no layer is called and PEFT passes over, adapters on a base with new tokens, a quantised base where
it cannot run, an expert block whose class the installed transformers does not have, DoRA that is plain LoRA.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.config.errors import LaunchError
from pipeline.training import tuning
from pipeline.training.tuning import MOE_BLOCKS, adapters, check_tuning, linear_layers, quantisation
from tests.training.making import LORA, precision_of, profile, shape, train_params

pytestmark = pytest.mark.unit

DORA = LORA | {"kind": "dora"}
QLORA = LORA | {"kind": "qlora", "bits": 4}
BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base's folder with the names of a Llama of two blocks, in two files."""
    matrix = np.zeros((4, 4), dtype=np.float32)
    first = {f"model.layers.0.{name}.weight": matrix for name in BLOCK} | {"model.embed_tokens.weight": matrix}
    second = {f"model.layers.1.{name}.weight": matrix for name in BLOCK} | {
        "model.norm.weight": matrix[0],
        "lm_head.weight": matrix,
    }
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if installed: it is an extra, and its kernels need a GPU."""
    found = importlib.util.find_spec
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: found("json") if name == "bitsandbytes" else found(name))


def _check(base: Path, kind: dict[str, Any], *, cuda: bool = True, model: Any = None, **changed: Any) -> None:
    machine = changed.pop("machine", {})
    params = train_params(tuning=kind, **{"precision": precision_of("bf16"), **changed})
    check_tuning(params, cuda=cuda, profile=profile(**machine), shape=model or shape(tied=False), model=base)


def _refusal(base: Path, kind: dict[str, Any], **changed: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        _check(base, kind, **changed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [{"kind": "full"}, LORA, DORA], ids=lambda kind: kind["kind"])
def test_what_works_is_not_refused(base: Path, kind: dict[str, Any], zero: int) -> None:
    _check(base, kind, machine={"zero": zero})
    _check(base, kind, machine={"zero": zero}, cuda=False, precision=precision_of("fp32"))


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_works_on_a_gpu(base: Path, bits: int) -> None:
    for zero in (1, 2):
        _check(base, QLORA | {"bits": bits}, machine={"zero": zero})


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(
    ("changed", "way_out"),
    [
        ({"cuda": False}, "use kind: lora, or device: cuda"),
        ({"machine": {"zero": 3}}, "use zero: 2"),
        ({"precision": precision_of("fp32")}, "use compute: bf16"),
        ({"precision": precision_of("tf32")}, "use compute: bf16"),
        ({"precision": precision_of("bf16", embeddings="fp32")}, "use embeddings: compute"),
        ({"model": shape(kind="mixtral", experts=8)}, "use kind: lora"),
    ],
)
def test_a_quantised_base_that_cannot_run_is_refused(base: Path, changed: dict[str, Any], way_out: str) -> None:
    said = _refusal(base, QLORA, **changed)
    assert said.startswith("train.tuning.kind = 'qlora'")
    assert way_out in said


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_package_is_named(base: Path) -> None:
    assert "pip install 'sft-ladder[qlora]'" in _refusal(base, QLORA)


@pytest.mark.parametrize("kind", [{"kind": "full"}, LORA], ids=lambda kind: kind["kind"])
def test_a_base_that_is_stored_quantised_is_refused(base: Path, kind: dict[str, Any]) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}))
    assert "stored quantised" in _refusal(base, kind)


def test_adapters_are_refused_on_a_base_with_new_tokens(base: Path) -> None:
    (base / "manifest.json").write_text(json.dumps({"new_tokens": ["<call>", "<result>"], "files": {}}))
    said = _refusal(base, LORA)
    assert "2 new tokens" in said
    assert "use kind: full" in said
    _check(base, {"kind": "full"})
    (base / "manifest.json").write_text(json.dumps({"new_tokens": [], "files": {}}))
    _check(base, LORA)


def test_magnitudes_need_fp32_masters(base: Path) -> None:
    assert "use masters: fp32" in _refusal(base, DORA, precision=precision_of("bf16", "bf16"))
    _check(base, LORA, precision=precision_of("bf16", "bf16"))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_prj"], ["'q_prj'", "did you mean 'q_proj'?"]),
        (["q_proj", "up_prj"], ["'up_prj'", "did you mean 'up_proj'?"]),
        (["xyzzy"], ["there are: down_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"]),
        (["all-linear", "q_proj"], ["all-linear", "leave the others out"]),
        (["proj"], ["'proj'"]),
        (["embed_tokens"], ["'embed_tokens'"]),
    ],
)
def test_a_target_that_no_layer_is_called_is_refused(base: Path, targets: list[str], said: list[str]) -> None:
    message = _refusal(base, LORA | {"target_modules": targets})
    assert [s for s in said if s not in message] == [], message


def test_targets_that_exist_are_taken(base: Path) -> None:
    for targets in (["q_proj", "v_proj"], ["self_attn.q_proj"], ["model.layers.1.mlp.down_proj"], ["lm_head"]):
        _check(base, LORA | {"target_modules": targets})


def test_adapters_on_a_tied_head_are_refused(base: Path) -> None:
    assert "leave it out" in _refusal(base, LORA | {"target_modules": ["q_proj", "lm_head"]}, model=shape(tied=True))


def test_layers_are_those_peft_adapts(base_model: Path) -> None:
    """Held against PEFT on the scratch base: `all-linear` takes the same layers, the head apart."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    config = adapters(train_params(tuning=LORA).tuning)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), config)
    adapted = {n.removeprefix("base_model.model.").partition(".lora_A")[0] for n, _ in model.named_parameters() if "lora_A" in n}
    assert adapted == linear_layers(base_model) - {"lm_head"}
    assert adapted


@pytest.mark.parametrize("kind", [LORA, DORA], ids=lambda kind: kind["kind"])
def test_adapters_are_what_was_asked_for(base_model: Path, kind: dict[str, Any]) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    made = adapters(train_params(tuning=kind | {"target_modules": ["q_proj"], "dropout": 0.5}).tuning)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), made)
    trained = {name.split(".lora_")[1].split(".")[0]: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == ({"A", "B"} if kind is LORA else {"A", "B", "magnitude_vector"})
    assert (trained["A"].shape, trained["B"].shape) == ((4, 16), (16, 4))
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    assert layer.scaling["default"] == 8 / 4
    assert layer.lora_dropout["default"].p == 0.5


def test_full_tuning_has_neither_adapters_nor_quantisation() -> None:
    assert adapters(train_params().tuning) is None
    assert quantisation(train_params()) is None
    assert quantisation(train_params(tuning=LORA)) is None


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_four_bits_compute_in_the_runs_format(compute: str) -> None:
    import torch

    made = quantisation(train_params(tuning=QLORA, precision=precision_of(compute)))
    assert made.load_in_4bit
    assert not made.load_in_8bit
    assert made.bnb_4bit_compute_dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    assert made.bnb_4bit_quant_type == "nf4"
    assert made.bnb_4bit_use_double_quant
    assert made.bnb_4bit_quant_storage == torch.uint8


def test_eight_bits() -> None:
    made = quantisation(train_params(tuning=QLORA | {"bits": 8}, precision=precision_of("bf16")))
    assert (made.load_in_8bit, made.load_in_4bit) == (True, False)


@pytest.mark.parametrize("kind", sorted(MOE_BLOCKS))
def test_every_expert_block_is_in_the_installed_transformers(kind: str) -> None:
    """DeepSpeed only warns of a class that the model does not have, and then hooks hang."""
    for block in MOE_BLOCKS[kind]:
        module, _, name = block.rpartition(".")
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        classes = {
            node.name for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
        }
        assert name in classes


def test_deepspeed_finds_the_expert_blocks() -> None:
    import torch
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
    from transformers import AutoModelForCausalLM, OlmoeConfig

    config = OlmoeConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    leaves = apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig(classes=list(MOE_BLOCKS["olmoe"])))
    assert [type(leaf).__name__ for leaf in leaves] == ["OlmoeSparseMoeBlock"] * 2


def test_an_unknown_expert_block_is_refused_under_zero_3_unless_it_is_named(base: Path) -> None:
    model = shape(kind="llama4_text", experts=16)
    said = _refusal(base, {"kind": "full"}, model=model, machine={"zero": 3})
    assert "'llama4_text'" in said
    assert "leaf_module.classes" in said
    _check(base, {"kind": "full"}, model=model, machine={"zero": 2})
    _check(base, {"kind": "full"}, model=shape(kind="mixtral", experts=8), machine={"zero": 3})
    named = {"zero_optimization": {"leaf_module": {"classes": ["transformers.models.llama4.modeling_llama4.Llama4TextMoe"]}}}
    _check(base, {"kind": "full"}, model=model, machine={"zero": 3}, deepspeed_override=named)
