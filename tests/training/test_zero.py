"""The DeepSpeed configuration that a spec renders, held against the installed DeepSpeed's own classes and engines.

Would catch: a bucket that is no whole number or is odd, a key DeepSpeed does not know, an offload or ZeRO++ field that
changes nothing, gradients of micro-batches summed in bf16, a stage whose shards cannot be exported, a compiler needed on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config.errors import LaunchError
from pipeline.training.tuning import MOE_BLOCKS
from pipeline.training.validity import check_config
from pipeline.training.zero import LEAST_BUCKET, MOST_BUCKET, check_zero, deepspeed_config, operators
from tests.training.making import precision_of, shape, spec
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

PLUS = {"partition": 2, "quantised_weights": True, "quantised_gradients": True}
NVME = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "/tmp"}


def _numbers(block: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{path}{key}", value


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "cpu"])
@pytest.mark.parametrize("hidden", [13, 16, 4096])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_takes_it_at_every_stage_and_width(stage: int, hidden: int, cuda: bool) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = deepspeed_config(spec(machine={"zero": stage}, model=shape(hidden), cuda=cuda))
    check_config(config)
    assert [name for name, value in _numbers(config) if isinstance(value, float)] == ["gradient_clipping"]
    taken = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert taken.stage == stage
    if stage:
        assert taken.overlap_comm is cuda
        assert 2 <= taken.reduce_bucket_size <= MOST_BUCKET
    if stage in (1, 2):
        assert taken.allgather_bucket_size % 2 == 0  # DeepSpeed asserts it
    if stage == 3:
        assert taken.param_persistence_threshold == 10 * hidden
        assert taken.prefetch_bucket_size == taken.reduce_bucket_size


@pytest.mark.parametrize(
    ("model", "cuda", "bucket"),
    [
        (shape(13), True, 2 * (4 * 13 * 13 + 3 * 13 * 39) + 401 * 13 + 1),  # the whole model, made even
        (shape(1536, intermediate_size=8960, layers=28, vocab_size=151_936), True, 4 * 1536**2 + 3 * 1536 * 8960),
        (shape(1024, intermediate_size=2048, layers=28, vocab_size=151_936), True, LEAST_BUCKET),
        (shape(4096, intermediate_size=14_336, layers=32, vocab_size=128_256), True, MOST_BUCKET),
        (shape(4096, intermediate_size=14_336, layers=32, vocab_size=128_256), False, LEAST_BUCKET),
    ],
    ids=["whole model", "one block", "least", "most", "most on a CPU"],
)
def test_a_bucket_is_a_block_within_limits(model: Any, cuda: bool, bucket: int) -> None:
    assert deepspeed_config(spec(model=model, cuda=cuda))["zero_optimization"]["reduce_bucket_size"] == bucket


def test_offload_to_host_memory_is_pinned_on_a_gpu_and_uses_deepspeeds_adam() -> None:
    machine = {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}
    config = deepspeed_config(spec(machine=machine))
    check_config(config)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_force_ds_cpu_optimizer"] is True
    assert operators(spec(machine=machine)) == ["cpu_adam"]


def test_nothing_is_compiled_on_a_cpu() -> None:
    for machine in (
        {"zero": 2, "offload_optimizer": "cpu"},
        {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ):
        made = spec(machine=machine, cuda=False)
        assert deepspeed_config(made)["zero_force_ds_cpu_optimizer"] is False
        assert operators(made) == []


def test_offload_to_disk_has_buffers_that_hold_the_largest_matrix() -> None:
    model = shape(4096, intermediate_size=14_336, layers=32, vocab_size=128_256)
    config = deepspeed_config(spec(machine={"zero": 3, **NVME}, model=model, ranks=8))
    check_config(config)
    parameters = config["zero_optimization"]["offload_param"]
    assert (parameters["device"], parameters["nvme_path"]) == ("nvme", "/tmp")
    assert 128_256 * 4096 / 8 <= parameters["buffer_size"] < 128_256 * 4096 / 8 + 2**20
    assert config["aio"]["block_size"] == 2**20
    assert config["zero_optimization"]["sub_group_size"] == 100_000_000
    assert operators(spec(machine={"zero": 3, **NVME})) == ["cpu_adam", "async_io"]


def test_zero_plus_plus_is_rendered() -> None:
    made = spec(machine={"zero": 3, "zero_plus_plus": PLUS})
    zero = deepspeed_config(made)["zero_optimization"]
    check_config(deepspeed_config(made))
    assert (zero["zero_hpz_partition_size"], zero["zero_quantized_weights"], zero["zero_quantized_gradients"]) == (2, True, True)
    assert operators(made) == ["quantizer"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (spec(machine={"zero": 3, "zero_plus_plus": {**PLUS, "partition": 4}}, ranks=6), "use 1 or 2 or 3 or 6"),
        (spec(machine={"zero": 3, "zero_plus_plus": PLUS}, cuda=False), "quantised_*: false"),
        (spec(machine={"zero": 3, **NVME}, cuda=False), "use 'cpu' or 'none'"),
        (spec(machine={"zero": 3, **NVME, "nvme_path": "/no/such/disk"}), "'/no/such/disk'"),
    ],
)
def test_partitions_that_the_ranks_cannot_take_are_refused(made: Any, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_zero(made)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_partitions_that_work_are_not_refused() -> None:
    check_zero(spec())
    check_zero(spec(machine={"zero": 3, **NVME}))
    check_zero(spec(machine={"zero": 3, "zero_plus_plus": PLUS}, ranks=6))
    check_zero(spec(machine={"zero": 3, "zero_plus_plus": {**PLUS, "quantised_weights": False, "quantised_gradients": False}}))


@pytest.mark.parametrize(("communication", "rendered"), [("compute", "bf16"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_gradients_are_reduced_in_the_format_of_the_profile(communication: str, rendered: str) -> None:
    config = deepspeed_config(spec(params={"precision": precision_of("bf16")}, machine={"communication": communication}))
    assert config["communication_data_type"] == rendered


@pytest.mark.parametrize(
    ("accumulation", "communication", "summed"), [(1, "compute", "bf16"), (2, "compute", "fp32"), (1, "fp32", "fp32")]
)
def test_gradients_are_summed_in_fp32_where_there_is_a_sum(accumulation: int, communication: str, summed: str) -> None:
    made = spec(params={"precision": precision_of("bf16")}, machine={"communication": communication}, accumulation=accumulation)
    assert deepspeed_config(made)["data_types"]["grad_accum_dtype"] == summed


def test_ranks_that_share_a_sequence_count_as_ranks() -> None:
    """Engine, accelerate and transformers take each for a group of its own; the loss is scaled for that."""
    made = spec(machine={"sequence_parallel": 2}, ranks=4)
    config = deepspeed_config(made)
    check_config(config)
    assert config["train_batch_size"] == made.micro_batch * made.accumulation * 4
    assert deepspeed_config(spec())["train_batch_size"] == 8


def test_the_flops_profiler_writes_into_the_run() -> None:
    config = deepspeed_config(spec(machine={"profile_flops": True, "activation_checkpointing": 0.5}))
    check_config(config)
    block = config["flops_profiler"]
    assert (block["profile_step"], block["recompute_fwd_factor"], block["output_file"]) == (5, 0.5, "models/runs/test/flops.txt")
    assert "flops_profiler" not in deepspeed_config(spec())


def test_clipping_is_the_engines() -> None:
    """One limit, rendered once; the adaptive rule starts from its ceiling."""
    adaptive = {"kind": "adaptive", "max_norm": 0.5, "window": 10, "deviations": 2.0}
    assert deepspeed_config(spec(params={"clipping": {"kind": "fixed", "max_norm": 1e-6}}))["gradient_clipping"] == 1e-6
    assert deepspeed_config(spec(params={"clipping": adaptive}))["gradient_clipping"] == 0.5


@pytest.mark.parametrize("kind", sorted(MOE_BLOCKS))
def test_expert_blocks_are_leaves(kind: str) -> None:
    config = deepspeed_config(spec(machine={"zero": 3}, model=shape(kind=kind, experts=8)))
    check_config(config)
    assert config["zero_optimization"]["leaf_module"] == {"classes": list(MOE_BLOCKS[kind])}


def test_a_valid_override_is_in_the_configuration() -> None:
    config = deepspeed_config(spec(params={"deepspeed_override": {"zero_optimization": {"reduce_bucket_size": 1000}}}))
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config["zero_optimization"]["stage"] == 2


# What a real engine does with it

SUM = 0.25 + 3 / 1024
"""Norm of the gradient that `engine_probe` sums over four micro-batches."""


def _single(made: Any, **changed: Any) -> dict[str, Any]:
    """For one process with four micro-batches of one row, and no limit on the norm."""
    config = deepspeed_config(made)
    return config | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1e6} | changed


def _case(compute: str, stage: int, *, embeddings: str = "compute", masters: str = "fp32", **machine: Any) -> dict[str, Any]:
    made = spec(
        params={"precision": precision_of(compute, masters, embeddings)},
        machine={"zero": stage, **machine},
        cuda=False,
        accumulation=4,
    )
    return _single(made)


CASES: dict[str, dict[str, Any]] = {
    **{f"fp32 {stage}": _case("fp32", stage) for stage in range(4)},
    **{f"bf16 {stage}": _case("bf16", stage) for stage in range(4)},
    "bf16 2 summed in bf16": {**_case("bf16", 2), "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 2": _case("fp16", 2),
    "fp16 3": _case("fp16", 3),
    "bf16 masters 2": _case("bf16", 2, masters="bf16"),
    "bf16 masters 3": _case("bf16", 3, masters="bf16"),
    "offload 2": _case("fp32", 2, offload_optimizer="cpu"),
    "offload 3": _case("fp32", 3, offload_optimizer="cpu", offload_parameters="cpu"),
    "bf16 offload 1": _case("bf16", 1, offload_optimizer="cpu", communication="fp32"),  # ZeRO-1 reduces the sum, not its parts
    # Autocast last: DeepSpeed keeps it in a global (torch_autocast.py:26)
    "embeddings 0": _case("bf16", 0, embeddings="fp32"),
    "embeddings 2": _case("bf16", 2, embeddings="fp32"),
    "embeddings 3": _case("bf16", 3, embeddings="fp32"),
    "embeddings fp16 2": _case("fp16", 2, embeddings="fp32"),
}


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    """Each case given to an engine, in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.engine_probe"],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        timeout=120,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CASES), done.stderr[-2000:]
    return dict(zip(CASES, lines, strict=True))


WORKING = [name for name in CASES if name not in ("bf16 0", "bf16 1", "embeddings fp16 2", "bf16 2 summed in bf16")]


@pytest.mark.parametrize("name", WORKING)
def test_the_engine_sums_in_fp32_and_its_shards_can_be_exported(engines: dict[str, Any], name: str) -> None:
    said = engines[name]
    assert "error" not in said
    assert said["norm"] == pytest.approx(SUM, rel=1e-6) or (said["norm"] is None and name.endswith(" 0"))
    if not name.endswith(" 0"):
        assert said["exported"] == ["torch.bfloat16" if "masters" in name else "torch.float32"]
    computed = (
        "torch.float32" if name.startswith(("fp32", "offload")) else "torch.float16" if "fp16" in name else "torch.bfloat16"
    )
    embedded = "torch.float32" if name.startswith("embeddings") else computed
    assert said["seen"] == [embedded, computed]


def test_a_sum_in_bf16_would_show(engines: dict[str, Any]) -> None:
    assert engines["bf16 2 summed in bf16"]["norm"] == 0.25


def test_what_is_refused_still_does_not_work(engines: dict[str, Any]) -> None:
    """The reasons behind `check_precision`; where one of these fails, DeepSpeed has changed and a rule can go."""
    assert "unsupported mix" in engines["bf16 0"]["error"]
    assert engines["bf16 1"]["optimizer"] == "BF16_Optimizer"
    assert "is not a zero checkpoint" in engines["bf16 1"]["exported"]
    assert engines["embeddings fp16 2"]["norm"] == pytest.approx(SUM * 2**16, rel=1e-2)


def test_the_configuration_is_rendered_without_torch() -> None:
    code = (
        "import sys; from tests.training.making import spec; from pipeline.training.zero import deepspeed_config;"
        "deepspeed_config(spec()); sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
