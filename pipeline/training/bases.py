"""Which base models can be trained on packed rows. Imports no torch.

Contract: `check_base` reads the base's configuration and raises LaunchError for an architecture whose documents would see each
other in a pack, or whose attention or logits are of a form that the code here does not have, so that it would be left out in
silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config.errors import LaunchError
from pipeline.config.profile import Profile
from pipeline.training.shape import ModelShape

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Values of `layer_types` that are attention."""

CARRIES_STATE = frozenset(
    {
        *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h"),
        *("granitemoehybrid", "recurrent_gemma", "rwkv", "xlstm", "qwen3_next", "lfm2", "lfm2_moe", "kimi_linear", "minimax"),
    }
)
"""Families with convolutions, state spaces or linear attention along the tokens, which run on from one document into the next.
Tried with LFM2: a change in the first document moved the logits of the second by 8.3."""

CAPS = ("logits_soft_cap", "output_logit_soft_cap", "logit_softcap")
"""Names under which few families cap their logits; `head.py` knows Gemma's `final_logit_softcapping`."""


def check_base(model: Path, shape: ModelShape, profile: Profile) -> None:
    """LaunchError for a base that packed training cannot be right for, or that the profile cannot split."""
    whole: dict[str, Any] = read_json(model / "config.json", "the base model's configuration")
    config = {**whole, **(whole.get("text_config") or {})}
    what = f"the base is a '{shape.kind}'"
    others = sorted({*(config.get("layer_types") or ())} - ATTENTION_LAYERS)
    if others or shape.kind in CARRIES_STATE:
        kinds = ", ".join(others) or "state along the tokens"
        raise LaunchError(
            f"{what} with {kinds}: it would carry one document of a pack into the next; use a base of attention layers"
        )
    for name in CAPS:
        if config.get(name):
            raise LaunchError(f"{what} with {name} = {config[name]}: the loss would be of uncapped logits; use another base")
    if config.get("attn_logit_softcapping") or shape.kind == "gpt_oss":
        form = "attention sinks" if shape.kind == "gpt_oss" else f"attn_logit_softcapping = {config['attn_logit_softcapping']}"
        raise LaunchError(f"{what} with {form}: no attention here that keeps documents apart has it; use another base")
    if shape.key_value_heads % profile.sequence_parallel:
        raise LaunchError(
            f"sequence_parallel: {profile.sequence_parallel}: must divide the base's {shape.key_value_heads} key-value heads"
        )
