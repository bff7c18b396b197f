"""New tokens, added in one place: to the base model's folder, before anything tokenises, partitions or trains.

Contract: `add_tokens` changes tokenizer, configuration and embedding in the folder it is given, so every rank loads the same
vocabulary. A new row, of the head too, is the mean of the rows of the old tokens: logits then start near those of a common
token, while random rows start with a loss of their own (arXiv:2106.12672, section 3). Only files that hold such a row are
rewritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.errors import ConfigError, ModelError

ALIGNMENT = 8
"""A grown vocabulary is filled to a multiple of this: 16 bytes a row in bf16, below which matrix units are not used."""

_ROWS_AT_ONCE = 8192


def add_tokens(folder: Path, tokens: Sequence[str]) -> int:
    """Give a model folder new tokens and return the rows of its embedding. ConfigError for a token that is empty, twice there
    or known already; ModelError for a folder whose embedding is not found."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    known = tokenizer.get_vocab()
    _check(tokens, known)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = int((config if "vocab_size" in config else config["text_config"])["vocab_size"])
    if not tokens:
        return rows
    old = max(known.values()) + 1
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    if ids != list(range(old, old + len(tokens))):
        raise ModelError(f"base.new_tokens: the tokenizer numbers them {ids}, not from {old}; use a base with a fast tokenizer")
    needed = old + len(tokens)
    if needed > rows:
        needed = -(-needed // ALIGNMENT) * ALIGNMENT
    _rewrite(folder, min(old, rows), old + len(tokens), max(rows, needed))
    _set_vocabulary(folder, config, max(rows, needed))
    tokenizer.save_pretrained(folder)
    return max(rows, needed)


def _check(tokens: Sequence[str], known: dict[str, int]) -> None:
    for number, token in enumerate(tokens):
        what = f"base.new_tokens[{number}] = {token!r}"
        if not token.strip():
            raise ConfigError(f"{what}: a token needs a character that shows; leave it out")
        if token in tokens[:number]:
            raise ConfigError(f"{what}: is listed twice; leave one out")
        if token in known:
            raise ConfigError(f"{what}: the tokenizer knows it already, as {known[token]}; leave it out")


def _rewrite(folder: Path, old: int, used: int, rows: int) -> None:
    """Set the rows from `old` to `used` of input and output embedding to the mean of those before, and grow them to `rows`."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    names = _vocabulary_tensors(folder)
    changed, added = set(), 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            here = names & set(file.keys())
            metadata = file.metadata()
        if not here:
            continue
        tensors = load_file(path)
        for name in here:
            grown = _grown(tensors[name], old, used, rows)
            added += grown.nbytes - tensors[name].nbytes
            tensors[name] = grown
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=metadata or {"format": "pt"})
        partial.replace(path)
        changed |= here
    if not any(re.search(r"\bweight$", name) for name in changed):
        raise ModelError(
            f"{folder.name}: no tensor is called {' or '.join(sorted(names))}, so new tokens have no row; use a base whose names "
            "are those of its transformers class"
        )
    _add_to_index(folder, added)


def _grown(tensor: Any, old: int, used: int, rows: int) -> Any:
    import torch

    total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
    for start in range(0, old, _ROWS_AT_ONCE):  # in fp64 and in one order: the same mean whatever the threads
        total += tensor[start : min(start + _ROWS_AT_ONCE, old)].double().sum(0)
    mean = (total / old).to(tensor.dtype)
    grown = torch.empty((max(rows, tensor.shape[0]), *tensor.shape[1:]), dtype=tensor.dtype)
    grown[: tensor.shape[0]] = tensor
    grown[old:used] = mean
    grown[tensor.shape[0] :] = mean
    return grown


def _vocabulary_tensors(folder: Path) -> set[str]:
    """Names of the parameters of input embedding and head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    wanted = {id(p) for part in parts if part is not None for p in part.parameters(recurse=False)}
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in wanted}


def _set_vocabulary(folder: Path, config: dict[str, Any], rows: int) -> None:
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and "vocab_size" in part:
            part["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add_to_index(folder: Path, added: int) -> None:
    path = folder / "model.safetensors.index.json"
    if path.is_file():
        index = json.loads(path.read_text(encoding="utf-8"))
        index["metadata"]["total_size"] += added
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
