"""The DeepSpeed configuration of a run, generated from its spec; there is no second source of these values. Imports no torch.

Contract: plain numbers only, no "auto"; `train.deepspeed_override` is laid over it by `override.py`. Source of the keys:
DeepSpeed's configuration classes (runtime/zero/config.py, runtime/config.py of 0.19.8), against which `validity.py` holds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.errors import LaunchError
from pipeline.training.override import overridden
from pipeline.training.precision import accumulation_format, communication_format, engine_config
from pipeline.training.shape import ModelShape
from pipeline.training.spec import Spec
from pipeline.training.tuning import MOE_BLOCKS

LEAST_BUCKET, MOST_BUCKET = 50_000_000, 200_000_000
"""Elements reduced or gathered at once on a GPU. 100 MB in bf16 take 0.2 ms over NVLink, against about 0.02 ms before the first
byte arrives; 400 MB, held twice, are the most that is worth the memory."""

FLOPS_STEP = 5
"""Step that the flops profiler measures: kernels are compiled and caches warm by then."""

FLOPS_FILE = "flops.txt"


def deepspeed_config(spec: Spec) -> dict[str, Any]:
    """The configuration dictionary handed to the engine and stored with the run. ConfigError for an override it refuses."""
    params, profile = spec.params, spec.profile
    communication = communication_format(params.precision, profile)
    config: dict[str, Any] = {
        # The product is the global batch, times the ranks that share a sequence: the engine takes each rank for a group of its
        # own, and so do accelerate and transformers. The loss is scaled for that (`trainer.compute_loss`).
        "train_batch_size": spec.micro_batch * spec.accumulation * spec.ranks,
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": params.clipping.max_norm,
        "communication_data_type": communication,
        "data_types": {"grad_accum_dtype": accumulation_format(params.precision, spec.accumulation, communication)},
        "zero_optimization": _zero(spec),
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        # With the optimizer offloaded, accelerate puts DeepSpeed's CPU Adam in the place of torch's AdamW (accelerator.py:2376).
        # Not on a CPU: there torch's is at home, and DeepSpeed's would be compiled for a minute.
        "zero_force_ds_cpu_optimizer": spec.cuda and profile.offload_optimizer != "none",
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        **engine_config(params.precision),
    }
    if "nvme" in (profile.offload_optimizer, profile.offload_parameters):
        config["aio"] = {
            "block_size": 2**20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    if profile.profile_flops:
        config["flops_profiler"] = {
            "enabled": True,
            "profile_step": min(FLOPS_STEP, spec.steps),
            "recompute_fwd_factor": profile.activation_checkpointing,
            "module_depth": -1,
            "top_modules": 3,
            "detailed": True,
            "output_file": str(Path(spec.run) / FLOPS_FILE),
        }
    return overridden(config, params.deepspeed_override)


def operators(spec: Spec) -> list[str]:
    """DeepSpeed's compiled operators that the run loads, for the check that builds them once before ranks start."""
    profile, plus = spec.profile, spec.profile.zero_plus_plus
    needed = []
    if spec.cuda and profile.offload_optimizer != "none":
        needed.append("cpu_adam")
    if "nvme" in (profile.offload_optimizer, profile.offload_parameters):
        needed.append("async_io")
    if plus is not None and (plus.quantised_weights or plus.quantised_gradients):
        needed.append("quantizer")
    return needed


def check_zero(spec: Spec) -> None:
    """LaunchError for a way of partitioning that these ranks cannot take."""
    plus, ranks = spec.profile.zero_plus_plus, spec.ranks
    if "nvme" in (spec.profile.offload_optimizer, spec.profile.offload_parameters):
        if not spec.cuda:
            raise LaunchError("offload to 'nvme' on a CPU: what would be moved is in host memory already; use 'cpu' or 'none'")
        if not Path(spec.profile.nvme_path or "").is_dir():
            raise LaunchError(f"nvme_path: '{spec.profile.nvme_path}': no such folder here; make it on a local disk of each host")
    if plus is None:
        return
    if not spec.cuda and (plus.quantised_weights or plus.quantised_gradients):
        raise LaunchError("zero_plus_plus: quantised traffic has kernels for GPUs only; use quantised_*: false on a CPU")
    if ranks % plus.partition:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise LaunchError(
            f"zero_plus_plus.partition: {plus.partition}: must divide the {ranks} ranks; use {' or '.join(map(str, fitting))}"
        )


def _zero(spec: Spec) -> dict[str, Any]:
    profile, shape, stage = spec.profile, spec.shape, spec.profile.zero
    zero: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return zero
    bucket = _bucket(shape, spec.cuda)
    zero |= {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        # Needs a second stream, which a CPU has not; with one rank it only waits for the device after each backward pass.
        "overlap_comm": spec.cuda and spec.ranks > 1,
        "reduce_bucket_size": bucket,
    }
    if profile.offload_optimizer != "none":
        zero["offload_optimizer"] = _offload(spec, profile.offload_optimizer)
    if stage < 3:
        return zero | {"allgather_bucket_size": bucket}
    zero |= {
        # The next block while this one computes; what a block's norms and biases hold is not worth a message.
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 10 * shape.hidden_size,
        "stage3_gather_16bit_weights_on_model_save": False,  # the export stage reads the shards
        # DeepSpeed's own linear layer, put in the place of torch's in the whole process, is code the compiler must see through:
        # 774 ms a step with it, 662 without (1.5 B parameters, one H200).
        "memory_efficient_linear": profile.kernels != "compiled",
    }
    if profile.offload_parameters != "none":
        zero["offload_param"] = _offload(spec, profile.offload_parameters)
        if profile.offload_parameters == "nvme":
            zero["offload_param"] |= {"buffer_count": 5, "buffer_size": _largest_partition(shape, spec.ranks)}
    if profile.offload_optimizer == "nvme":
        zero["sub_group_size"] = 100_000_000  # four buffers of this many fp32 numbers are pinned: 1.6 GB, not 16
    if plus := profile.zero_plus_plus:
        zero |= {
            "zero_hpz_partition_size": plus.partition,
            "zero_quantized_weights": plus.quantised_weights,
            "zero_quantized_gradients": plus.quantised_gradients,
        }
    if shape.experts:
        zero["leaf_module"] = {"classes": list(MOE_BLOCKS.get(shape.kind, ()))}
    return zero


def _offload(spec: Spec, device: str) -> dict[str, Any]:
    """Pinned, so that copies run beside the arithmetic; a CPU's own memory is not pinned."""
    block: dict[str, Any] = {"device": device, "pin_memory": spec.cuda}
    return block | {"nvme_path": spec.profile.nvme_path} if device == "nvme" else block


def _bucket(shape: ModelShape, cuda: bool) -> int:
    """One decoder block, which is what a backward pass finishes at a time, within the limits; never more than the model, and
    even, since DeepSpeed aligns gathered buffers to two elements (stage_1_and_2.py:390)."""
    size = min(max(shape.block_parameters, LEAST_BUCKET), MOST_BUCKET if cuda else LEAST_BUCKET)
    size = min(size, shape.parameters)
    return size + size % 2


def _largest_partition(shape: ModelShape, ranks: int) -> int:
    """Elements of the largest matrix on one rank, to the next MiB: a buffer must hold it whole. Experts are stored as one."""
    widths = (shape.vocab_size, 2 * shape.intermediate_size * max(1, shape.experts))
    return -(-max(widths) * shape.hidden_size // (ranks * 2**20)) * 2**20
