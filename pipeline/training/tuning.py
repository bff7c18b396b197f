"""Which weights are trained: adapters, a quantised base, expert blocks. What cannot work is refused by name before launch.
Imports no torch, transformers or peft at the top.

Contract: `adapters` and `quantisation` render `train.tuning` for PEFT and for the loader; `check_tuning` reads the base's folder
(configuration, manifest, headers of the safetensors) and raises LaunchError. Line numbers: peft 0.21.2, trl 1.16.0, transformers
5.24.0, deepspeed 0.19.8.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.artifact import MANIFEST, read_json, read_manifest
from pipeline.config.errors import LaunchError, ModelError
from pipeline.config.params import DoraTuning, FullTuning, LoraTuning, QloraTuning, TrainParams
from pipeline.config.profile import Profile
from pipeline.training.precision import load_dtype
from pipeline.training.shape import ModelShape

Tuning = FullTuning | LoraTuning | DoraTuning | QloraTuning

ALL_LINEAR = "all-linear"

MOE_BLOCKS: dict[str, tuple[str, ...]] = {
    kind: (f"transformers.models.{kind}.modeling_{kind}.{block}",)
    for kind, block in {
        "deepseek_v2": "DeepseekV2Moe",
        "deepseek_v3": "DeepseekV3MoE",
        "dots1": "Dots1MoE",
        "ernie4_5_moe": "Ernie4_5_MoeSparseMoeBlock",
        "flex_olmo": "FlexOlmoSparseMoeBlock",
        "glm4_moe": "Glm4MoeMoE",
        "gpt_oss": "GptOssMLP",
        "granitemoe": "GraniteMoeMoE",
        "jamba": "JambaSparseMoeBlock",
        "lfm2_moe": "Lfm2MoeSparseMoeBlock",
        "minimax": "MiniMaxSparseMoeBlock",
        "mixtral": "MixtralSparseMoeBlock",
        "olmoe": "OlmoeSparseMoeBlock",
        "phimoe": "PhimoeSparseMoeBlock",
        "qwen2_moe": "Qwen2MoeSparseMoeBlock",
        "qwen3_moe": "Qwen3MoeSparseMoeBlock",
        "qwen3_next": "Qwen3NextSparseMoeBlock",
    }.items()
}
"""Expert block of each family, by `model_type`. Under ZeRO-3 it is gathered as a whole (`zero_optimization.leaf_module`):
ranks send tokens to different experts, and hooks inside would wait for each other in different orders. DeepSpeed only warns of
a class that the model does not have (z3_leaf_module.py:245), so a test looks each up."""

_EMBEDDINGS = frozenset({"embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "tok_embeddings", "embed_positions"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_HEAD = "lm_head"


def adapters(tuning: Tuning) -> Any:
    """The `peft.LoraConfig` of a tuning; None where every weight is trained."""
    if not isinstance(tuning, LoraTuning):
        return None
    from peft import LoraConfig

    targets: Any = ALL_LINEAR if tuning.target_modules == [ALL_LINEAR] else list(tuning.target_modules)
    return LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        target_modules=targets,
        use_dora=isinstance(tuning, DoraTuning),
        bias="none",
        task_type="CAUSAL_LM",
    )


def quantisation(params: TrainParams) -> Any:
    """The `transformers.BitsAndBytesConfig` for the loader, which then needs `device_map={"": LOCAL_RANK}`; None elsewhere.

    4 bits are stored as uint8: DeepSpeed casts every floating parameter to the format of the arithmetic (engine.py:1861), and
    packed bits that posed as bf16 would not survive it under fp16.
    """
    tuning = params.tuning
    if not isinstance(tuning, QloraTuning):
        return None
    from transformers import BitsAndBytesConfig

    if tuning.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=load_dtype(params.precision),
        bnb_4bit_quant_storage="uint8",
    )


def check_tuning(params: TrainParams, *, cuda: bool, profile: Profile, shape: ModelShape, model: Path) -> None:
    """LaunchError for a tuning that this base, device, ZeRO stage or set of packages cannot carry. `model`: the base's folder."""
    for refused in (
        _by_base(params.tuning, model),
        _by_quantisation(params, cuda, profile, shape),
        _by_masters(params),
        _by_targets(params.tuning, shape, model),
        _by_experts(params.deepspeed_override, profile, shape),
    ):
        if refused is not None:
            raise LaunchError(refused)


def linear_layers(model: Path) -> set[str]:
    """Full names of the base's linear layers, from the headers of its safetensors: matrices called `*.weight`, less embeddings,
    routers and experts, which transformers keeps as one tensor and PEFT does not adapt by name."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                matrices = [n for n in file.keys() if len(file.get_slice(n).get_shape()) == 2]  # noqa: SIM118 - no mapping
        except Exception as error:  # safetensors' own error class is not public
            raise ModelError(f"{path}: not a whole safetensors file ({error}); run `dvc repro base`") from error
        names |= {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    return {n for n in names if ".experts." not in n and n.rpartition(".")[2] not in _EMBEDDINGS | _ROUTERS}


def _by_base(tuning: Tuning, model: Path) -> str | None:
    what = f"train.tuning.kind = '{tuning.kind}'"
    if "quantization_config" in read_json(model / "config.json", "the base model's configuration"):
        return (
            f"{what}: the base is stored quantised, and its weights can be neither trained nor merged; use the base it was made "
            "from, with kind: qlora for a small footprint"
        )
    added = read_manifest(model, "the base model").get("new_tokens") if (model / MANIFEST).is_file() else None
    if added and isinstance(tuning, LoraTuning):
        return (
            f"{what} with {len(added)} new tokens in the base ({added[0]!r} ...): adapters leave the embedding as it is, so they "
            "would stay the mean of all others; use kind: full, or base.new_tokens: []"
        )
    return None


def _by_quantisation(params: TrainParams, cuda: bool, profile: Profile, shape: ModelShape) -> str | None:
    tuning, precision = params.tuning, params.precision
    if not isinstance(tuning, QloraTuning):
        return None
    what = "train.tuning.kind = 'qlora'"
    if not cuda:
        return f"{what} on a CPU: the {tuning.bits}-bit kernels are for GPUs; use kind: lora, or device: cuda"
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"{what}: package bitsandbytes is not installed; run `pip install 'sft-ladder[qlora]'`, or use kind: lora"
    if profile.zero == 3:
        # modeling_utils.py:3824 and 4530: a quantised model is left out of zero.Init and of the partitioned loading
        return (
            f"{what} with zero: 3: each rank would load the whole quantised base before it is partitioned, so nothing is saved; "
            "use zero: 2, or kind: lora"
        )
    if precision.compute not in ("bf16", "fp16"):
        return (  # sft_trainer.py:908
            f"{what} with precision.compute '{precision.compute}': TRL holds the adapters of a quantised base in bf16; use "
            "compute: bf16"
        )
    if precision.embeddings == "fp32":
        return f"{what} with precision.embeddings 'fp32': the quantised layers are not under autocast; use embeddings: compute"
    if shape.experts:
        return (
            f"{what}: the base has {shape.experts} experts a block, stored as one tensor that bitsandbytes does not quantise; "
            "use kind: lora"
        )
    return None


def _by_masters(params: TrainParams) -> str | None:
    if isinstance(params.tuning, DoraTuning) and params.precision.masters == "bf16":
        return (  # the reason TRL keeps magnitudes out of bf16 (sft_trainer.py:906)
            "train.tuning.kind = 'dora' with precision.masters 'bf16': updates of the magnitudes are below what bf16 holds, and "
            "they would stay where they are; use masters: fp32"
        )
    return None


def _by_targets(tuning: Tuning, shape: ModelShape, model: Path) -> str | None:
    if not isinstance(tuning, LoraTuning) or tuning.target_modules == [ALL_LINEAR]:
        return None
    layers = linear_layers(model)
    short = sorted({name.rpartition(".")[2] for name in layers})
    for target in tuning.target_modules:
        what = f"train.tuning.target_modules: '{target}'"
        if target == ALL_LINEAR:
            return f"{what} beside others: it means all linear layers but the head by itself; leave the others out"
        if target.rpartition(".")[2] == _HEAD and shape.tied:
            return f"{what}: the base's head is its embedding, and adapters on one would part them; leave it out"
        if not any(name == target or name.endswith(f".{target}") for name in layers):  # PEFT passes over it if others match
            near = difflib.get_close_matches(target, short, n=1, cutoff=0.5)
            return f"{what}: no linear layer of the base is called so; " + (
                f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(short)}"
            )
    return None


def _by_experts(override: Mapping[str, Any], profile: Profile, shape: ModelShape) -> str | None:
    if not shape.experts or profile.zero != 3 or shape.kind in MOE_BLOCKS:
        return None
    zero = override.get("zero_optimization")
    if isinstance(zero, Mapping) and "leaf_module" in zero:
        return None
    return (
        f"zero: 3 with a base of type '{shape.kind}', {shape.experts} experts a block: its expert block is not known here, and "
        "undeclared it can hang when ranks choose different experts; use zero: 2, or name the class in "
        "train.deepspeed_override.zero_optimization.leaf_module.classes"
    )
