"""New tokens in a base model's folder.

Would catch: a vocabulary shorter than the tokenizer, rows that are random or differ from run to run, old rows that changed, a
head left without the rows, an untied copy of a tied embedding, a tokenizer that cuts the new token up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from pipeline.artifact import digest_folder
from pipeline.base.tokens import ALIGNMENT, add_tokens
from pipeline.config.errors import ConfigError, ModelError

pytestmark = pytest.mark.unit

TOKENS = ["<call>", "<result>", "<思考>"]


@pytest.fixture
def folder(base_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny tied scratch base."""
    shutil.copytree(base_model, tmp_path / "base")
    (tmp_path / "base/manifest.json").unlink()
    return tmp_path / "base"


def _untied(folder: Path, rows: int, dtype: torch.dtype = torch.float32) -> None:
    """Put an untied model with `rows` rows, in several files, in the place of the folder's."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="10KB")


def _rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def test_a_tied_base_grows_by_the_mean(folder: Path) -> None:
    before, _ = _rows(folder)
    old = len(AutoTokenizer.from_pretrained(folder))
    rows = add_tokens(folder, TOKENS)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    after, head = _rows(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"] == rows == after.shape[0]
    assert len(tokenizer) == old + len(TOKENS) <= rows
    assert rows % ALIGNMENT == 0
    assert torch.equal(after, head)
    assert torch.equal(after[: len(before)], before)
    for token in TOKENS:
        (number,) = tokenizer.encode(f"{token}", add_special_tokens=False)
        torch.testing.assert_close(after[number], before[:old].mean(0))
    assert tokenizer.decode(tokenizer.encode(f"a{TOKENS[0]}b", add_special_tokens=False), skip_special_tokens=True) == "a<call>b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untied_base_in_several_files_gets_rows_in_both(folder: Path, dtype: torch.dtype) -> None:
    old = len(AutoTokenizer.from_pretrained(folder))
    _untied(folder, old, dtype)
    before = _rows(folder)
    files = digest_folder(folder)
    size = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    rows = add_tokens(folder, TOKENS)
    after = _rows(folder)
    assert not torch.equal(before[0], before[1])
    for was, now in zip(before, after, strict=True):
        assert now.dtype == dtype
        assert now.shape[0] == rows
        assert torch.equal(now[:old], was)
        assert torch.equal(now[old], was.double().mean(0).to(dtype))
        assert torch.equal(now[old : old + 1].expand(rows - old, -1), now[old:])
    grown = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert grown - size == 2 * (rows - old) * 16 * dtype.itemsize
    kept = [n for n, digest in digest_folder(folder).items() if n.endswith(".safetensors") and files[n] == digest]
    assert kept  # files without such a row are not rewritten


def test_rows_a_padded_base_has_already_are_used(folder: Path) -> None:
    old = len(AutoTokenizer.from_pretrained(folder))
    _untied(folder, old + 10)
    before, _ = _rows(folder)
    assert add_tokens(folder, TOKENS) == old + 10
    after, _ = _rows(folder)
    torch.testing.assert_close(after[old], before[:old].mean(0))
    assert torch.equal(after[old : old + 3], after[old].expand(3, -1))
    assert torch.equal(after[old + 3 :], before[old + 3 :])
    assert torch.equal(after[:old], before[:old])


def test_twice_the_same_folder_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "again")
    threads = torch.get_num_threads()
    add_tokens(folder, TOKENS)
    try:
        torch.set_num_threads(1)
        add_tokens(tmp_path / "again", TOKENS)
    finally:
        torch.set_num_threads(threads)
    assert digest_folder(folder) == digest_folder(tmp_path / "again")


def test_no_tokens_change_nothing(folder: Path) -> None:
    before = digest_folder(folder)
    rows = add_tokens(folder, [])
    assert rows == _rows(folder)[0].shape[0]
    assert digest_folder(folder) == before


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["<call>", ""], "base.new_tokens[1] = ''"),
        (["  "], "base.new_tokens[0] = '  '"),
        (["<call>", "<result>", "<call>"], "base.new_tokens[2] = '<call>': is listed twice"),
        (["a"], "base.new_tokens[0] = 'a': the tokenizer knows it already"),
    ],
)
def test_tokens_that_are_none_are_refused(folder: Path, tokens: list[str], said: str) -> None:
    before = digest_folder(folder)
    with pytest.raises(ConfigError) as caught:
        add_tokens(folder, tokens)
    assert str(caught.value).startswith(said)
    assert "leave" in str(caught.value)
    assert digest_folder(folder) == before


def test_an_embedding_under_another_name_is_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({f"other.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="no tensor is called"):
        add_tokens(folder, TOKENS)
