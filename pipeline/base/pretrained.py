"""A pretrained base model from a folder, a GGUF file or the hub, checked and laid down as safetensors.

Contract: what lands in the folder is config, safetensors, tokenizer.json, tokenizer configuration, generation configuration and
chat template (where the source has one), and loads offline. Content is pinned: a hash or a commit that does not match is
refused. No code of the model is run and no pickle is read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.artifact import canonical, digest_file, digest_folder, digest_text
from pipeline.config.errors import ModelError
from pipeline.config.params import GgufBase, HubBase, PathBase

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "generation_config.json")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


def from_path(params: PathBase, folder: Path) -> None:
    """Copy a local Hugging Face folder whose content hash is the one stated."""
    source = Path(params.path)
    if not source.is_dir():
        raise ModelError(f"base.path = '{params.path}': no such folder; it holds a model in Hugging Face form")
    _check_is_model(source, f"base.path = '{params.path}'")
    found = digest_text(canonical(digest_folder(source)))
    if found != params.content:
        raise ModelError(
            f"base.content = '{params.content[:12]}...': the folder's content is {found}; "
            "if that is the model you mean, write it there"
        )
    _lay_down(source, folder)


def from_hub(params: HubBase, folder: Path) -> None:
    """Download one commit of a hub model; the only step of the product that uses a network."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import snapshot_download

    try:
        source = Path(snapshot_download(params.id, revision=params.revision, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client's errors share no base: HTTP, connection, validation, disk
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"base.id = '{params.id}' at {params.revision[:12]}: not to be had from the hub: {first}; check id, commit, "
            "network and token (HF_TOKEN), or use base.kind: path"
        ) from error
    finally:
        os.environ["HF_HUB_OFFLINE"] = "1"
    _check_is_model(source, f"base.id = '{params.id}'")
    _lay_down(source, folder)


def from_gguf(params: GgufBase, folder: Path) -> None:
    """Dequantise a GGUF file to fp32 safetensors."""
    source = _gguf_file(params)
    found = digest_file(source)
    if found != params.sha256:
        raise ModelError(
            f"base.sha256 = '{params.sha256[:12]}...': the file's is {found}; if that is the file you mean, write it there"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("base.kind = 'gguf': package gguf is not installed; run `pip install 'sft-ladder[gguf]'`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except Exception as error:  # transformers and gguf raise what they meet: OSError, KeyError, ValueError, struct.error
        raise ModelError(
            f"base.file = '{params.file}': not a GGUF file transformers can read: {str(error).splitlines()[0]}"
        ) from error
    # A model loaded from GGUF counts as quantised and refuses to be saved: the same weights in a fresh model do not.
    config = type(loaded.config).from_dict({k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model: Any = type(loaded)(config)
    model.to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_file(params: GgufBase) -> Path:
    root = Path()
    if params.package is not None:
        spec = importlib.util.find_spec(params.package)
        if spec is None or spec.origin is None:
            raise ModelError(
                f"base.package = '{params.package}': not installed; `pip install {params.package.replace('_', '-')}`"
            )
        root = Path(spec.origin).parent
    source = root / params.file
    if not source.is_file():
        there = ", ".join(sorted(p.name for p in source.parent.glob("*.gguf"))) if source.parent.is_dir() else ""
        raise ModelError(f"base.file = '{params.file}': no such file; GGUF files there: {there or 'none'}")
    return source


def _check_is_model(source: Path, what: str) -> None:
    import json

    config = source / "config.json"
    if not config.is_file():
        raise ModelError(f"{what}: no config.json, so it is no model in Hugging Face form")
    if not any(source.glob("*.safetensors")):
        raise ModelError(
            f"{what}: no *.safetensors; pickled weights are not read, convert them with transformers' save_pretrained"
        )
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{what}: config.json is not JSON ({error})") from error
    if "auto_map" in described:
        raise ModelError(
            f"{what}: needs Python code of its own (auto_map), which is not run; use a model whose architecture transformers has"
        )


def _lay_down(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(source).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(
            folder
        )  # also writes tokenizer.json where only a slow form is there
    except Exception as error:  # transformers raises OSError, KeyError, ValueError by what is missing
        raise ModelError(
            f"{source.name}: transformers cannot read its configuration or tokenizer: {str(error).splitlines()[0]}"
        ) from error
    for pattern in _WEIGHTS:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
