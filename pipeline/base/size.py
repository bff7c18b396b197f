"""How large a model folder is, read from its files' headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from pipeline.config.errors import ModelError


@dataclass(frozen=True)
class Size:
    """parameters: numbers in the weight files (tied tensors once); bytes: of the weight files; vocab_size: rows of the
    embedding."""

    parameters: int
    tensors: int
    bytes: int
    vocab_size: int


def measure(folder: Path) -> Size:
    """Size of the safetensors in a model folder; ModelError for a file that is none."""
    files = sorted(folder.glob("*.safetensors"))
    parameters = tensors = 0
    for path in files:
        try:
            with safe_open(path, framework="np") as weights:
                shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - no mapping
        except Exception as error:  # safetensors' own error class is not public
            raise ModelError(f"{path.name}: not a whole safetensors file ({error}); copy or download it again") from error
        parameters += sum(math.prod(shape) for shape in shapes)
        tensors += len(shapes)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocab = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0)
    return Size(parameters, tensors, sum(p.stat().st_size for p in files), vocab)
