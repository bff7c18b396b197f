"""Whether an exported folder is the model that was trained.

Contract: folders are loaded the standard way (`AutoModelForCausalLM.from_pretrained`), from disk, so that what is
compared is what a user gets.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def logit_gap(folder: Path, probe: Path) -> float:
    """Largest absolute difference between the export's logits and those the trained model left in `probe`."""
    expected = load_file(probe)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"], use_cache=False).logits.float()
    return float((logits - expected["logits"]).abs().max())


def weight_gap(one: Path, other: Path) -> float:
    """Largest absolute difference of a tensor between two folders; infinite where names or shapes differ."""
    ours, theirs = _tensors(one), _tensors(other)
    if ours.keys() != theirs.keys():
        return float("inf")
    gap = 0.0
    for name in ours:
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            return float("inf")
        gap = max(gap, float((a.float() - b.float()).abs().max()))
    return gap


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found
