"""The sizes of a model, read from its configuration: what buckets, plans and FLOP counts are made of. Imports no torch.

Contract: `read_shape` reads `config.json` of a Hugging Face folder and takes the text part of a multimodal one; ModelError
where a size is missing. Counts are of parameters, not bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config.errors import ModelError
from pipeline.config.params import Section


class ModelShape(Section):
    """Sizes of a decoder-only model."""

    kind: str
    """`model_type` of the configuration, such as `llama`."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """Whether the head is the transposed input embedding."""
    experts: int
    """Experts per block; 0 for a dense model."""

    @property
    def block_parameters(self) -> int:
        """Parameters of the matrices in one decoder block: attention, and an MLP of three matrices (SwiGLU) per expert."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size * max(1, self.experts)

    @property
    def parameters(self) -> int:
        """All matrices; norms and biases, far less than 1 in 1,000, are left out."""
        embeddings = self.vocab_size * self.hidden_size
        return self.layers * self.block_parameters + embeddings * (1 if self.tied else 2)

    def flops_per_token(self, mean_context: float) -> float:
        """FLOPs of forward and backward for one token: 6 for each parameter of a matrix product (the head once, the input
        embedding not at all), and 12 x layers x heads x head_dim x context for attention, context being the mean number of
        tokens that one attends to (PaLM, arXiv:2204.02311, appendix B). Recomputed activations do not count."""
        matrices = self.layers * self.block_parameters + self.vocab_size * self.hidden_size
        return 6 * matrices + 12 * self.layers * self.heads * self.head_dim * mean_context


def read_shape(model: Path) -> ModelShape:
    """The sizes of the model in a folder."""
    whole: dict[str, Any] = read_json(model / "config.json", "the base model's configuration")
    text = whole.get("text_config")
    config: dict[str, Any] = {**whole, **text} if isinstance(text, dict) else whole
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            kind=config["model_type"],
            hidden_size=config["hidden_size"],
            intermediate_size=config.get("moe_intermediate_size") or config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", True)),
            experts=config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0,
        )
    except KeyError as error:
        raise ModelError(
            f"{model / 'config.json'}: no {error}; a decoder-only model of the Hugging Face form has it, use such a base"
        ) from error
