"""The DeepSpeed configuration of a run, generated from its spec; there is no second source of these values.

Contract: plain numbers only, no "auto". Source of the keys: DeepSpeed's configuration reference.
"""

from __future__ import annotations

from typing import Any

from pipeline.training.precision import engine_config
from pipeline.training.spec import Spec

_BUCKET = 50_000_000
"""Elements reduced or gathered at once: 200 MB in fp32, small beside the weights and large beside a message's latency."""


def deepspeed_config(spec: Spec) -> dict[str, Any]:
    """The configuration dictionary handed to the engine and stored with the run."""
    zero: dict[str, Any] = {
        "stage": spec.zero,
        "contiguous_gradients": True,
        "overlap_comm": spec.cuda,  # needs a second stream, which a CPU has not
        "reduce_bucket_size": _BUCKET,
    }
    if spec.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": _BUCKET,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_gather_16bit_weights_on_model_save": False,  # the export stage reads the shards
        }
    else:
        zero |= {"reduce_scatter": True, "allgather_bucket_size": _BUCKET}
    return {
        "train_batch_size": spec.params.global_batch,
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": spec.params.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "zero_force_ds_cpu_optimizer": False,  # no offload: nothing is compiled at start
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        **engine_config(spec.params.precision),
    }
