"""One precision section for loader, trainer, launcher and engine.

Would catch: two of them told different formats, masters that are not fp32 unasked, a combination that runs into DeepSpeed's
assertions or loses its shards instead of being refused, a refusal without a way out.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.errors import LaunchError
from pipeline.config.params import Precision
from pipeline.training.precision import (
    announcement,
    check_precision,
    engine_config,
    launcher_environment,
    load_dtype,
    trainer_arguments,
)
from pipeline.training.validity import check_config
from pipeline.training.zero import deepspeed_config
from tests.training.making import precision_of, profile, spec

pytestmark = pytest.mark.unit

COMPUTE, MASTERS, EMBEDDINGS = ("fp32", "tf32", "bf16", "fp16"), ("fp32", "bf16"), ("compute", "fp32")


def _check(
    compute: str,
    masters: str = "fp32",
    embeddings: str = "compute",
    *,
    cuda: bool = True,
    capability: tuple[int, int] | None = (9, 0),
    accumulation: int = 2,
    tied: bool = False,
    **machine: Any,
) -> None:
    check_precision(
        Precision.model_validate(precision_of(compute, masters, embeddings)),
        cuda=cuda,
        capability=capability,
        profile=profile(**machine),
        accumulation=accumulation,
        tied=tied,
    )


# compute, masters, embeddings, ZeRO stage; rendered: engine block, autocast format, load, accelerate's word, TF32, summed in
RENDERED = [
    (("fp32", "fp32", "compute", 0), (None, None, "float32", "no", False, "fp32")),
    (("fp32", "fp32", "compute", 3), (None, None, "float32", "no", False, "fp32")),
    (("fp32", "fp32", "fp32", 2), (None, None, "float32", "no", False, "fp32")),
    (("tf32", "fp32", "compute", 2), (None, None, "float32", "no", True, "fp32")),
    (("bf16", "fp32", "compute", 2), ("bf16", None, "bfloat16", "bf16", False, "fp32")),
    (("bf16", "fp32", "compute", 3), ("bf16", None, "bfloat16", "bf16", False, "fp32")),
    (("bf16", "bf16", "compute", 2), ("bf16", None, "bfloat16", "bf16", False, "fp32")),
    (("bf16", "bf16", "compute", 3), ("bf16", None, "bfloat16", "bf16", False, "fp32")),
    (("bf16", "fp32", "fp32", 0), (None, "bf16", "float32", "no", False, "fp32")),
    (("bf16", "fp32", "fp32", 1), (None, "bf16", "float32", "no", False, "fp32")),
    (("bf16", "fp32", "fp32", 3), (None, "bf16", "float32", "no", False, "fp32")),
    (("fp16", "fp32", "compute", 1), ("fp16", None, "float16", "fp16", False, "fp32")),
    (("fp16", "fp32", "compute", 3), ("fp16", None, "float16", "fp16", False, "fp32")),
]

REFUSED = [
    (("bf16", "fp32", "compute", 0), "use zero: 1 or higher"),
    (("fp16", "fp32", "compute", 0), "use zero: 1 or higher"),
    (("bf16", "fp32", "compute", 1), "use zero: 2"),
    (("bf16", "bf16", "compute", 1), "use zero: 2"),
    (("bf16", "bf16", "fp32", 2), "use masters: fp32"),
    (("fp32", "bf16", "compute", 2), "use masters: fp32"),
    (("tf32", "bf16", "compute", 2), "use masters: fp32"),
    (("fp16", "bf16", "compute", 2), "use masters: fp32"),
    (("fp16", "fp32", "fp32", 2), "use compute: bf16"),
]


@pytest.mark.parametrize(("chosen", "expected"), RENDERED, ids=lambda value: " ".join(map(str, value)))
def test_one_section_is_rendered_for_all(chosen: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    compute, masters, embeddings, zero = chosen
    block, autocast, load, mixed, tf32, summed = expected
    _check(compute, masters, embeddings, zero=zero)
    precision = Precision.model_validate(precision_of(compute, masters, embeddings))
    config = deepspeed_config(spec(params={"precision": precision.model_dump()}, machine={"zero": zero}))
    assert [name for name in ("bf16", "fp16") if config[name]["enabled"]] == ([block] if block else [])
    assert config.get("torch_autocast", {}).get("dtype") == autocast
    assert config["bf16"]["bf16_master_weights_and_grads"] is config["bf16"]["bf16_optimizer_states"] is (masters == "bf16")
    assert config["data_types"]["grad_accum_dtype"] == summed
    assert load_dtype(precision) == load
    assert trainer_arguments(precision) == {"bf16": block == "bf16", "fp16": block == "fp16", "tf32": tf32}
    environment = launcher_environment(precision)
    assert environment == {"ACCELERATE_MIXED_PRECISION": mixed, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": str(int(tf32))}
    check_config(config)


@pytest.mark.parametrize(
    ("chosen", "way_out"), REFUSED, ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value))
)
def test_what_does_not_go_together_is_refused(chosen: tuple[Any, ...], way_out: str) -> None:
    compute, masters, embeddings, zero = chosen
    with pytest.raises(LaunchError) as caught:
        _check(compute, masters, embeddings, zero=zero)
    assert way_out in str(caught.value)
    assert str(caught.value).startswith("train.precision.")
    assert "\n" not in str(caught.value)


def test_every_combination_is_rendered_or_refused() -> None:
    """All 64; trainer and engine agree by transformers' own comparison, and DeepSpeed takes what is rendered."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    rendered, refused = [], []
    for compute, masters, embeddings, zero in itertools.product(COMPUTE, MASTERS, EMBEDDINGS, range(4)):
        name = (compute, masters, embeddings, zero)
        try:
            _check(compute, masters, embeddings, zero=zero)
        except LaunchError:
            refused.append(name)
            continue
        rendered.append(name)
        made = spec(params={"precision": precision_of(compute, masters, embeddings)}, machine={"zero": zero})
        config = deepspeed_config(made)
        check_config(config)
        if (block := [b for b in ("bf16", "fp16") if config[b]["enabled"]]) and zero == 0:
            pytest.fail(f"{name}: {block} leaves nothing to export")
        trainer = HfTrainerDeepSpeedConfig(config)
        said = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.0, "learning_rate": 1e-3}
        said |= {"world_size": made.ranks, "per_device_train_batch_size": made.micro_batch, "max_grad_norm": 1.0}
        said |= {"gradient_accumulation_steps": made.accumulation, "save_on_each_node": False}
        said |= {"fp16_full_eval": False, "bf16_full_eval": False, **trainer_arguments(made.params.precision)}
        trainer.trainer_config_process(SimpleNamespace(**said))
        assert trainer.mismatches == []
        assert str(trainer.dtype()) == f"torch.{load_dtype(made.params.precision)}"
    # fp32 and tf32 at each stage with either word for embeddings; bf16 at 2 and 3, with bf16 masters there too, with fp32
    # embeddings at each stage; fp16 at 1 to 3
    assert len(rendered) == 16 + 2 + 2 + 4 + 3
    assert len(rendered) + len(refused) == 64
    assert {chosen for chosen, _ in RENDERED} <= set(rendered)
    assert {chosen for chosen, _ in REFUSED} <= set(refused)


@pytest.mark.parametrize("compute", ["tf32", "bf16", "fp16"])
def test_a_cpu_computes_in_fp32_only(compute: str) -> None:
    _check("fp32", cuda=False, capability=None, zero=0)
    with pytest.raises(LaunchError, match=r"not on a CPU.*use 'fp32'"):
        _check(compute, cuda=False, capability=None)


@pytest.mark.parametrize("compute", ["tf32", "bf16"])
def test_a_gpu_without_the_units_is_refused(compute: str) -> None:
    with pytest.raises(LaunchError, match=r"compute capability 7\.5.*use 'fp16' or 'fp32'"):
        _check(compute, capability=(7, 5))
    _check("fp16", capability=(7, 5))
    _check(compute, capability=(8, 0))
    _check(compute, capability=None)


@pytest.mark.parametrize(
    ("chosen", "machine", "way_out"),
    [
        (("bf16", "bf16", "compute"), {"offload_optimizer": "cpu"}, "offload_optimizer: none"),
        (("bf16", "fp32", "fp32"), {"zero": 3, "tied": True}, "use zero: 2"),
        (("bf16", "fp32", "fp32"), {"communication": "fp32"}, "use communication: compute"),
        (("bf16", "fp32", "compute"), {"environment": {"ACCELERATE_MIXED_PRECISION": "fp16"}}, "leave it out of the profile"),
        (("fp32", "fp32", "compute"), {"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, "leave it out of the profile"),
        (("bf16", "fp32", "compute"), {"communication": "fp16"}, "use communication: bf16 or compute"),
        (("fp32", "fp32", "compute"), {"communication": "fp16"}, "use communication: bf16 or compute"),
        (
            ("bf16", "fp32", "fp32"),
            {"zero": 3, "zero_plus_plus": {"partition": 1, "quantised_weights": True, "quantised_gradients": False}},
            "quantised_weights: false",
        ),
    ],
)
def test_what_the_profile_makes_impossible_is_refused(chosen: tuple[str, ...], machine: dict[str, Any], way_out: str) -> None:
    with pytest.raises(LaunchError) as caught:
        _check(*chosen, **machine)
    assert way_out in str(caught.value)
    _check(*chosen)  # without that line of the profile


def test_zero_1_in_bf16_works_where_nothing_is_summed_or_the_optimizer_is_offloaded() -> None:
    _check("bf16", zero=1, accumulation=1)
    _check("bf16", zero=1, offload_optimizer="cpu")


def test_bf16_masters_are_said() -> None:
    for compute in COMPUTE:
        assert announcement(Precision.model_validate(precision_of(compute))) is None
    said = announcement(Precision.model_validate(precision_of("bf16", "bf16")))
    assert said is not None
    assert "'bf16'" in said
    assert "lost" in said


def test_fp16_has_a_scale_that_does_not_reach_the_floor_at_once() -> None:
    block = engine_config(Precision.model_validate(precision_of("fp16")))["fp16"]
    assert (block["loss_scale"], block["initial_scale_power"], block["hysteresis"], block["min_loss_scale"]) == (0, 16, 2, 1)


@pytest.mark.parametrize(("compute", "mode"), [("tf32", "high"), ("bf16", "highest")])
def test_torch_obeys_the_launchers_switch_for_tf32(compute: str, mode: str) -> None:
    """NVIDIA's containers set it to 1."""
    environment = launcher_environment(Precision.model_validate(precision_of(compute)))
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_float32_matmul_precision())"],
        env={**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == mode
