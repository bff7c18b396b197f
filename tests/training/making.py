"""Parameters, profiles and specs for tests of the training room; every field is stated once, here."""

from __future__ import annotations

from typing import Any

from pipeline.config.params import TrainParams
from pipeline.config.profile import Profile
from pipeline.training.shape import ModelShape
from pipeline.training.spec import Spec

_PARAMS: dict[str, Any] = {
    "tuning": {"kind": "full"},
    "precision": {"compute": "fp32", "masters": "fp32", "embeddings": "compute"},
    "global_batch": 8,
    "epochs": 1,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_share": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "clipping": {"kind": "fixed", "max_norm": 1.0},
    "seed": 1,
    "deepspeed_override": {},
}

_PROFILE: dict[str, Any] = {
    "launcher": "local",
    "device": "auto",
    "ranks": "auto",
    "threads_per_rank": 1,
    "micro_batch": 2,
    "zero": 2,
    "offload_optimizer": "none",
    "offload_parameters": "none",
    "nvme_path": None,
    "zero_plus_plus": None,
    "communication": "compute",
    "attention": "auto",
    "kernels": "plain",
    "activation_checkpointing": 0.0,
    "sequence_parallel": 1,
    "tiled_mlp": 1,
    "on_out_of_memory": "fail",
    "profile_flops": False,
    "checkpoint_every": 10,
    "environment": {},
}

LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["all-linear"]}


def train_params(**changed: Any) -> TrainParams:
    return TrainParams.model_validate(_PARAMS | changed)


def precision_of(compute: str, masters: str = "fp32", embeddings: str = "compute") -> dict[str, str]:
    return {"compute": compute, "masters": masters, "embeddings": embeddings}


def profile(**changed: Any) -> Profile:
    return Profile.model_validate(_PROFILE | changed)


def shape(hidden: int = 16, **changed: Any) -> ModelShape:
    """A Llama of two blocks with one head, so that odd widths are possible."""
    sizes: dict[str, Any] = {
        "kind": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "layers": 2,
        "heads": 1,
        "key_value_heads": 1,
        "head_dim": hidden,
        "vocab_size": 401,
        "tied": True,
        "experts": 0,
    }
    return ModelShape.model_validate(sizes | changed)


def spec(
    *,
    params: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    model: ModelShape | None = None,
    cuda: bool = True,
    ranks: int = 2,
    accumulation: int = 2,
) -> Spec:
    used = profile(**(machine or {}))
    return Spec(
        fingerprint="0" * 64,
        model="models/base",
        packed="data/packed",
        run="models/runs/test",
        params=train_params(**(params or {})),
        steps=20,
        sequences=None,
        resume_from=None,
        profile=used,
        cuda=cuda,
        ranks=ranks,
        threads=1,
        micro_batch=used.micro_batch,
        accumulation=accumulation,
        checkpoint_every=10,
        shape=model or shape(),
    )
