"""`train.deepspeed_override`: what is laid over the generated configuration, and what is refused.

Would catch: a second source for a value that a field of ours decides, a key that DeepSpeed passes over in silence, a number
that is text, a block replaced as a whole, a refusal whose key no DeepSpeed knows any more.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pipeline.config.errors import ConfigError, LaunchError
from pipeline.training.override import DECIDED, overridden
from pipeline.training.validity import check_config, problem
from pipeline.training.zero import deepspeed_config
from tests.training.making import precision_of, spec

pytestmark = pytest.mark.unit

GENERATED = deepspeed_config(spec(params={"precision": precision_of("bf16")}, machine={"zero": 3, "offload_optimizer": "cpu"}))


def _nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # pyright: ignore[reportReturnType] - a path has a key


@pytest.mark.parametrize(
    ("path", "value", "instead"),
    [
        ("train_batch_size", 16, "train.global_batch"),
        ("train_micro_batch_size_per_gpu", 4, "profile's micro_batch"),
        ("gradient_accumulation_steps", 4, "train.global_batch"),
        ("gradient_clipping", 0.5, "train.clipping"),
        ("optimizer", {"type": "Lion", "params": {"lr": 1e-4}}, "train.learning_rate"),
        ("optimizer.params.lr", 1e-4, "train.learning_rate"),
        ("scheduler.type", "WarmupLR", "train.schedule"),
        ("bf16.enabled", False, "train.precision.compute"),
        ("bf16.bf16_master_weights_and_grads", True, "train.precision.masters"),
        ("fp16", {"enabled": True, "loss_scale": 128}, "train.precision.compute"),
        ("torch_autocast", {"enabled": True}, "train.precision.embeddings"),
        ("data_types.grad_accum_dtype", "bf16", "leave it out"),
        ("communication_data_type", "fp16", "profile's communication"),
        ("zero_optimization.stage", 2, "profile's zero"),
        ("zero_optimization.offload_optimizer.device", "none", "profile's offload_optimizer"),
        ("zero_optimization.offload_param", {"device": "cpu"}, "profile's offload_parameters"),
        ("zero_optimization.cpu_offload", True, "profile's offload_optimizer"),
        ("zero_optimization.zero_quantized_weights", True, "profile's zero_plus_plus"),
        ("zero_optimization.contiguous_gradients", False, "leave it out"),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", True, "export stage"),
        ("activation_checkpointing.partition_activations", True, "profile's activation_checkpointing"),
        ("flops_profiler.enabled", True, "profile's profile_flops"),
        ("sequence_parallel_size", 2, "profile's sequence_parallel"),
        ("gradient_allreduce_op", "sum", "leave it out"),
        ("data_efficiency", {"enabled": True}, "order of the data"),
        ("zero_force_ds_cpu_optimizer", False, "offload_optimizer"),
    ],
)
def test_what_the_schema_decides_is_refused(path: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(GENERATED, _nested(path, value))
    message = str(caught.value)
    assert message.startswith(f"train.deepspeed_override.{path}")
    assert instead in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"load_balancing": {"enabled": True}}, ["load_balancing", "no DeepSpeed has it"]),
        ({"zero_optimization": {"load_balancing": True}}, ["zero_optimization.load_balancing", "no DeepSpeed has it"]),
        ({"gradient_cliping": 1.0}, ["gradient_cliping", "did you mean 'gradient_clipping'?"]),
        ({"zero_optimization": {"reduce_bucket_sise": 1}}, ["reduce_bucket_sise", "did you mean 'reduce_bucket_size'?"]),
        ({"zero_optimization": {"offload_optimizer": {"pin_memry": True}}}, ["offload_optimizer.pin_memry", "'pin_memory'?"]),
        ({"data_types": {"bufer_dtype": "fp32"}}, ["data_types.bufer_dtype", "did you mean 'buffer_dtype'?"]),
        ({"aio": {"blok_size": 1}}, ["aio.blok_size", "did you mean 'block_size'?"]),
        ({"monitor": {}}, ["monitor", "unknown to DeepSpeed"]),
        ({"nebula": {"enabled": True}}, ["refuses it: Nebula"]),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, ["zero_optimization.reduce_bucket_size = 1.5", "valid integer"]),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, ["zero_optimization.reduce_bucket_size = -1", "greater than 0"]),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, ["'5e8'", "write 5e8 without"]),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, ["'auto'", "write the number"]),
        ({"zero_optimization": True}, ["zero_optimization = True", "name the key inside it"]),
        ({"zero_optimization": {}}, ["zero_optimization = {}", "name the key inside it"]),
        ({"fp16": None}, ["fp16 = None", "name the key inside it"]),
    ],
)
def test_what_deepspeed_does_not_know_or_take_is_refused(override: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(GENERATED, override)
    message = str(caught.value)
    assert [s for s in said if s not in message] == [], message
    assert message.startswith("train.deepspeed_override")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.reduce_bucket_size", 1000),
        ("zero_optimization.stage3_max_live_parameters", 10_000_000),
        ("zero_optimization.offload_optimizer.pipeline_read", True),
        ("zero_optimization.leaf_module", {"classes": ["SomeBlock"]}),
        ("fp16.initial_scale_power", 8),
        ("aio.queue_depth", 32),
        ("comms_logger.enabled", True),
        ("compile.deepcompile", True),
        ("flops_profiler.top_modules", 5),
        ("wall_clock_breakdown", True),
        ("data_types.buffer_dtype", "fp32"),
    ],
)
def test_what_the_schema_has_no_field_for_is_laid_over(path: str, value: Any) -> None:
    before = copy.deepcopy(GENERATED)
    override = _nested(path, value)
    merged = overridden(GENERATED, override)
    *blocks, leaf = path.split(".")
    expected = copy.deepcopy(before)
    inner = expected
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[leaf] = value
    assert merged == expected
    assert before == GENERATED
    assert override == _nested(path, value)
    check_config(merged)


def test_an_empty_override_changes_nothing() -> None:
    assert overridden(GENERATED, {}) == GENERATED


@pytest.mark.parametrize("path", sorted(DECIDED))
def test_every_refused_key_is_one_deepspeed_has_or_had(path: str) -> None:
    """A refusal for a key that is unknown anyway would hide the better answer."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS  # pyright: ignore[reportPrivateUsage]

    if path in _REMOVED_TOP_LEVEL_CONFIG_KEYS:
        return
    values: dict[str, Any] = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, "gradient_allreduce_op": "mean"}
    blocks = {
        "pipeline",
        "weight_quantization",
        "data_efficiency",
        "tensor_parallel",
        "activation_checkpointing",
        "hybrid_engine",
    }
    blocks |= {"autotuning", "expert_parallel", "torch_autocast", "bfloat16"}
    value = values.get(path, {} if path in blocks else None)
    if value is None:
        value = "fp32" if "type" in path else "/tmp" if path.endswith("path") else "cpu" if path.endswith("device") else False
    lowest = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **_nested(path, value)}
    lowest.setdefault("train_micro_batch_size_per_gpu", 1)
    found = problem(lowest)
    assert found is None or "unknown" not in found


# The check of a whole configuration


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"load_balancing": {}}, "no DeepSpeed has it"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1.5}}, "zero_optimization.reduce_bucket_size = 1.5"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size = 'auto'"),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage = 5"),
        ({"fp16": {"enabled": True}}, "cannot be simultaneously enabled"),
        ({"communication_data_type": "int8"}, "Got: int8"),
    ],
)
def test_a_configuration_deepspeed_would_not_take_does_not_start(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_config(GENERATED | changed)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
