"""`train.deepspeed_override` laid over the generated DeepSpeed configuration, key by key. Imports no torch where it is empty.

Contract: an override adds what the schema has no field for. A key that a field of ours decides, one that DeepSpeed does not
know, a number in quotes or "auto" is a ConfigError that names the key, the reason and what to use instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.errors import ConfigError
from pipeline.training.validity import problem

WHERE = "train.deepspeed_override"

_BATCH = "is decided by train.global_batch and the profile's micro_batch and ranks; set those"
_OPTIMIZER = "is decided by train.learning_rate, weight_decay and adam_*; set those"
_COMPUTE = "is decided by train.precision.compute; set that"
_MASTERS = "is decided by train.precision.masters; set that"
_OFFLOAD_OPTIMIZER = "is decided by the profile's offload_optimizer; set that"
_OFFLOAD_PARAMETERS = "is decided by the profile's offload_parameters; set that"
_PLUS = "is decided by the profile's zero_plus_plus; set that"
_COMMUNICATION = "is decided by the profile's communication; set that"
_ORDER = "would change the order of the data, which train.seed decides and a resumed run relies on; leave it out"
_RANKS = "would split the ranks in a way that the global batch does not count; leave it out"
_SHARDS = "is off because the export stage reads the shards; leave it out"
_CLASS = "follows from the profile's offload_optimizer; leave it out"
_ROOM = "is decided by the run, which keeps its files in its own folder; leave it out"

DECIDED: dict[str, str] = {
    "train_batch_size": "is decided by train.global_batch; set that",
    "train_micro_batch_size_per_gpu": "is decided by the profile's micro_batch; set that",
    "gradient_accumulation_steps": _BATCH,
    "managed_gradient_accumulation": _BATCH,
    "sequence_parallel_size": "is decided by the profile's sequence_parallel; set that",
    "gradient_clipping": "is decided by train.clipping; set that",
    "optimizer": _OPTIMIZER,
    "scheduler": "is decided by train.schedule and warmup_share; set those",
    "zero_allow_untested_optimizer": _CLASS,
    "zero_force_ds_cpu_optimizer": _CLASS,
    "bf16.enabled": _COMPUTE,
    "bf16.bf16_master_weights_and_grads": _MASTERS,
    "bf16.bf16_optimizer_states": _MASTERS,
    "bfloat16": _COMPUTE,
    "fp16.enabled": _COMPUTE,
    "fp16.auto_cast": _COMPUTE,
    "fp16.fp16_master_weights_and_grads": _MASTERS,
    "amp": _COMPUTE,
    "torch_autocast": "is decided by train.precision.embeddings; set that",
    "data_types.param_dtype": _COMPUTE,
    "data_types.grad_accum_dtype": "is fp32 where micro-batches are summed, so that their number does not matter; leave it out",
    "communication_data_type": _COMMUNICATION,
    "seq_parallel_communication_data_type": _COMMUNICATION,
    "gradient_allreduce_op": "would scale the loss by the number of ranks, and it is a mean over supervised tokens; leave it out",
    "prescale_gradients": "would scale gradients before they are reduced, which ZeRO-2 and 3 refuse; leave it out",
    "gradient_predivide_factor": "would scale gradients before they are reduced, which ZeRO-2 and 3 refuse; leave it out",
    "zero_optimization.stage": "is decided by the profile's zero; set that",
    "zero_optimization.offload_optimizer.device": _OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_optimizer.nvme_path": "is decided by the profile's nvme_path; set that",
    "zero_optimization.offload_param.device": _OFFLOAD_PARAMETERS,
    "zero_optimization.offload_param.nvme_path": "is decided by the profile's nvme_path; set that",
    "zero_optimization.cpu_offload": _OFFLOAD_OPTIMIZER,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD_OPTIMIZER,
    "zero_optimization.cpu_offload_param": _OFFLOAD_PARAMETERS,
    "zero_optimization.zero_hpz_partition_size": _PLUS,
    "zero_optimization.zero_quantized_weights": _PLUS,
    "zero_optimization.zero_quantized_gradients": _PLUS,
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "would store frozen weights in 8 bits, which the export does not read; use train.tuning.kind: qlora"
    ),
    "zero_optimization.contiguous_gradients": "must stay true: without it ZeRO leaves gradients unreduced on a CPU; leave it out",
    "zero_optimization.reduce_scatter": "must stay true: without it ZeRO leaves gradients unreduced on a CPU; leave it out",
    "zero_optimization.compute_grad_norm": "must stay true: train.clipping needs the norm; leave it out",
    "zero_optimization.load_from_fp32_weights": "must stay true: a resumed run continues from fp32 masters; leave it out",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _SHARDS,
    "zero_optimization.gather_16bit_weights_on_model_save": _SHARDS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _SHARDS,
    "activation_checkpointing": "is decided by the profile's activation_checkpointing (this block serves Megatron); set that",
    "flops_profiler.enabled": "is decided by the profile's profile_flops; set that",
    "flops_profiler.output_file": _ROOM,
    "checkpoint.load_universal": "is decided when a run is resumed on another number of ranks; leave it out",
    "checkpoint.use_node_local_storage": _ROOM,
    "dataloader_drop_last": _ORDER,
    "data_efficiency": _ORDER,
    "curriculum_learning": _ORDER,
    "tensor_parallel": _RANKS,
    "expert_parallel": _RANKS,
    "pipeline": _RANKS,
    "autotuning": "would choose micro-batch and ZeRO stage; `ladder plan` does that, and the profile's fields say it",
    "hybrid_engine": "serves generation between steps, of which there is none; leave it out",
    "weight_quantization": "is decided by train.tuning; use kind: qlora",
}
"""Keys an override may not set, by path, and why. A path stands for all below it."""


def overridden(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the override's leaves in it; neither argument is changed. ConfigError for what may not be set."""
    if not override:
        return dict(config)
    for path, value in _leaves(override):
        _check_leaf(path, value)
    merged = _merged(config, override)
    found = problem(merged)
    if found is not None:
        raise ConfigError(f"{WHERE}.{found}" if not found.startswith("DeepSpeed ") else f"{WHERE}: {found}")
    return merged


def _leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{where}.")
        else:
            yield where, value


def _check_leaf(path: str, value: Any) -> None:
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        reason = DECIDED.get(".".join(parts[:length]))
        if reason is not None:
            raise ConfigError(f"{WHERE}.{path} = {value!r}: {reason}")
    below = [decided for decided in DECIDED if decided.startswith(f"{path}.")]
    if below:  # a scalar, or nothing, in the place of a block: it would take decided keys away
        raise ConfigError(
            f"{WHERE}.{path} = {value!r}: is a block of which the schema decides '{below[0]}'; name the key inside it"
        )
    if value == "auto":
        raise ConfigError(f"{WHERE}.{path} = 'auto': nothing fills it in here; write the number")
    if isinstance(value, str) and _is_number(value):
        raise ConfigError(f"{WHERE}.{path} = {value!r}: a number in quotes is text; write {value} without them")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in override.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
