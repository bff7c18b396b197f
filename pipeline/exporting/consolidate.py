"""ZeRO shards to a standard model folder.

Contract: `export_model` reads one complete checkpoint with DeepSpeed's own converter, tensor by tensor, and writes
safetensors shards with index, config, tokenizer, chat template and a generation config that stops at the token which
ends a turn. Tied weights are stored once, adapters are merged (and kept beside in `adapter/`). The shards are this
product's own files; DeepSpeed's reader unpickles them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from pipeline.config.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"


def export_model(
    checkpoint: Path, zero: int, base: Path, folder: Path, *, stop_token: str, dtype: str, max_shard_gib: float
) -> None:
    """Write the model of a checkpoint folder into `folder`. ModelError for shards that do not make up the model."""
    state = _consolidated(checkpoint, zero)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        model = _with_adapters(base, checkpoint, state, folder)
    else:
        model = _model_of(AutoConfig.from_pretrained(checkpoint), state)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = stop_token
    stop = tokenizer.convert_tokens_to_ids(stop_token)
    model.config.eos_token_id = stop
    model.config.use_cache = True
    model.generation_config = _generation_config(base, stop, tokenizer)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=f"{int(max_shard_gib * 2**30 / 1e6)}MB")
    tokenizer.save_pretrained(folder)


def _consolidated(checkpoint: Path, zero: int) -> Mapping[str, torch.Tensor]:
    """Full fp32 tensors by parameter name."""
    if zero == 0:  # nothing is partitioned: rank 0's module state is the model
        files = sorted(checkpoint.glob("global_step*/mp_rank_00_model_states.pt"))
        return torch.load(files[-1], map_location="cpu", mmap=True, weights_only=False)["module"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the converter narrates
            state: Any = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), exclude_frozen_parameters=False)
        return state
    except (FileNotFoundError, ValueError) as error:
        raise ModelError(
            f"{checkpoint}: {error}; restore the folder or train again (`dvc repro --force --single-item train`)"
        ) from error


def _model_of(config: Any, state: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A model of `config` with the tensors of `state`, every parameter accounted for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_names(model, state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    _check_tensors(model)
    return model


def _with_adapters(base: Path, checkpoint: Path, state: Mapping[str, torch.Tensor], folder: Path) -> PreTrainedModel:
    """The base model with the checkpoint's adapters merged; the adapter itself is written to `folder/adapter`."""
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(checkpoint))
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    trained = {name: tensor for name, tensor in state.items() if "lora_" in name}
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    if trained.keys() != expected:
        raise ModelError(
            f"{checkpoint}: adapter tensors missing: {sorted(expected - trained.keys())[:3]}, "
            f"unknown: {sorted(trained.keys() - expected)[:3]}"
        )
    if not any(bool(tensor.any()) for name, tensor in trained.items() if "lora_B" in name):
        raise ModelError(
            f"{checkpoint}: every lora_B is zero, so nothing was trained; check target_modules and the learning rate"
        )
    model.load_state_dict(trained, strict=False)
    model.save_pretrained(str(folder / "adapter"))
    merged = model.merge_and_unload()
    _check_tensors(merged)
    return merged


def _check_names(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    tied = set(model.all_tied_weights_keys) if model.config.get_text_config().tie_word_embeddings else set()
    wanted = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(n for n in wanted if n not in state and n not in tied)
    unknown = sorted(n for n in state if n not in model.state_dict())
    if missing or unknown:
        raise ModelError(f"the checkpoint's tensors are not the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in state.items():
        if tensor.shape != model.state_dict()[name].shape:
            raise ModelError(
                f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(model.state_dict()[name].shape)} in the model"
            )


def _check_tensors(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name}: has no value in the checkpoint")
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"{name}: holds values that are not finite; the run diverged, see plots/train.jsonl")


def _generation_config(base: Path, stop: int, tokenizer: Any) -> GenerationConfig:
    """The base model's settings with the stop token first; other end tokens the base names stay valid."""
    path = base / "generation_config.json"
    config = GenerationConfig.from_pretrained(base) if path.is_file() else GenerationConfig()
    named = config.eos_token_id
    others = named if isinstance(named, list) else [named] if named is not None else []
    config.eos_token_id = [stop, *(t for t in others if t != stop)] if any(t != stop for t in others) else stop
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop
    return config
