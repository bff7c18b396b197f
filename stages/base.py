"""Materialise the base model and its tokenizer in one offline folder.

Contract: `model` holds config, safetensors, tokenizer, generation configuration, chat template where there is one, and
a manifest with the hash of each file.

Command: python -m stages.base --raw data/raw --model models/base --metrics metrics/base.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import publish
from pipeline.base import pretrained, scratch
from pipeline.base.size import measure
from pipeline.base.tokens import add_tokens
from pipeline.config.params import BaseParams, GgufBase, HubBase, PathBase, ScratchBase
from pipeline.stage import run_stage


@dataclass(frozen=True)
class BaseMetrics:
    parameters: int
    bytes: int
    vocab_size: int
    seconds: float


def base(base: BaseParams, *, raw: Path, model: Path) -> BaseMetrics:
    """Make, copy, convert or download the base model."""
    start = time.perf_counter()
    facts: dict[str, object] = {"kind": base.kind}
    with publish(model, facts) as folder:
        match base:
            case ScratchBase():
                scratch.make(base, raw, folder)
            case PathBase():
                pretrained.from_path(base, folder)
            case GgufBase():
                pretrained.from_gguf(base, folder)
            case HubBase():
                pretrained.from_hub(base, folder)
        if not isinstance(base, ScratchBase):
            add_tokens(folder, base.new_tokens)
            facts["new_tokens"] = base.new_tokens
        size = measure(folder)
        facts |= {"parameters": size.parameters, "vocab_size": size.vocab_size}
    return BaseMetrics(size.parameters, size.bytes, size.vocab_size, round(time.perf_counter() - start, 3))


if __name__ == "__main__":
    run_stage(base)
