"""Bases that packed training would be wrong for, in silence, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.errors import LaunchError
from pipeline.training.bases import check_base
from pipeline.training.shape import read_shape
from tests.training.making import spec

pytestmark = pytest.mark.unit

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def _check(folder: Path, config: dict[str, Any], **machine: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}), encoding="utf-8")
    check_base(folder, read_shape(folder), spec(machine=machine, ranks=4).profile)


@pytest.mark.parametrize(
    "config",
    [{}, {"layer_types": ["full_attention", "sliding_attention"]}, {"final_logit_softcapping": 30.0}, {"logit_softcap": None}],
)
def test_attention_layers_are_taken(config: dict[str, Any], tmp_path: Path) -> None:
    _check(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": ["conv", "full_attention"]}, "'llama' with conv: it would carry one document"),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, "linear_attention"),
        ({"model_type": "jamba"}, "'jamba' with state along the tokens"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap = 30.0: the loss would be of uncapped logits"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said):
        _check(tmp_path, config)


def test_shared_sequences_need_heads_to_share(tmp_path: Path) -> None:
    _check(tmp_path, {}, sequence_parallel=2)
    with pytest.raises(LaunchError, match="sequence_parallel: 4: must divide the base's 2 key-value heads"):
        _check(tmp_path, {}, sequence_parallel=4)
