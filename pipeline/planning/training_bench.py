"""How fast a model of some shape trains on this machine, plan by plan: the real training code on random weights.

Contract: works in a temporary folder; nothing of the project is read or written, so the figures can be had from the code alone.
Documents have lognormal lengths (median 350 tokens, sigma 0.9, 32 to the row's capacity), are packed as `pack` packs, and are
kept apart by attention. Masters are fp32 unless a plan says otherwise. Times are of whole optimizer steps, after `WARM` that
compile and fill caches; nothing is saved.

Command: ladder bench train --shape 1.5b --ranks 1
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.artifact import publish, read_json, write_json
from pipeline.config.errors import ConfigError, LadderError, RunFailed
from pipeline.config.params import TrainParams
from pipeline.config.profile import Profile
from pipeline.dataset.manifest import IGNORED
from pipeline.dataset.packing import best_fit_decreasing
from pipeline.launch.local import gpus_found
from pipeline.training.run import make_spec, start
from pipeline.training.shape import read_shape

WARM, TIMED = 3, 5
"""Optimizer steps before and during timing."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    "13b": {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000, "tie_word_embeddings": False},
    "tiny": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}
"""Qwen2.5's two smallest, Llama 3's 8B, Llama 2's 13B, and one for a CPU."""

FORMULA = (
    "MFU = tokens/s/GPU x (6 x parameters in matrix products + 12 x layers x heads x head_dim x mean context) / dense bf16 "
    "FLOP/s of the GPU; recomputed activations do not count"
)


@dataclass(frozen=True)
class Plan:
    """What is varied. capacity: tokens of a packed row; accumulation: micro-batches of a step; profile: fields beside the
    defaults of `_profile`; supervised: share of the tokens that is trained on, the rest being prompts."""

    name: str
    micro_batch: int
    accumulation: int
    capacity: int
    profile: Mapping[str, Any]
    supervised: float = 1.0


@dataclass(frozen=True)
class Measured:
    """A plan's figures: per GPU, and of the GPU that holds most. communication_share: of a forward and backward pass
    in which NCCL moves data, hidden behind arithmetic or not. failed: why there are no figures."""

    plan: Plan
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_per_step: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    communication_share: float | None = None
    loss: float | None = None
    versions: Mapping[str, str] | None = None
    failed: str | None = None


def plans(shape: str, ranks: int) -> list[Plan]:
    """What is worth comparing for a shape: the plain way first."""
    if shape == "tiny":
        return [Plan("plain", 2, 2, 256, {}), Plan("zero3", 2, 2, 256, {"zero": 3})]
    if shape in ("0.5b", "1.5b"):
        wide = 16 if shape == "0.5b" else 8
        fast = {"kernels": "compiled"}
        return [
            Plan("plain layers, document mask", 4, 1, 4096, {"attention": "sdpa"}),
            Plan("plain layers, varlen", wide // 2, 1, 4096, {}),
            Plan("compiled, one pass a step", wide, 1, 4096, fast),
            Plan("compiled, eight passes a step", wide, 8, 4096, fast),
            Plan("the same, 60 % supervised", wide, 8, 4096, fast, supervised=0.6),
            Plan("compiled, ZeRO-3", wide, 8, 4096, {**fast, "zero": 3}),
        ]
    base = {"zero": 3, "kernels": "compiled"}
    if shape == "8b":
        return [
            Plan("plain layers, all recomputed", 4, 1, 4096, {"zero": 3, "activation_checkpointing": 1.0}),
            Plan("compiled, nothing recomputed", 2, 4, 4096, base),
            Plan("compiled, a quarter recomputed", 3, 4, 4096, {**base, "activation_checkpointing": 0.25}),
        ]
    recomputed = {**base, "activation_checkpointing": 1.0}
    offload = {"offload_optimizer": "cpu"}
    return [
        Plan("no offload", 2, 2, 4096, recomputed),
        Plan("optimizer on the CPU", 2, 2, 4096, {**recomputed, **offload}),
        Plan("optimizer and parameters on the CPU", 2, 2, 4096, {**recomputed, **offload, "offload_parameters": "cpu"}),
    ]


def bench_train(shape: str, ranks: int, chosen: Sequence[Plan], time_limit: float) -> Iterator[Measured]:
    """Each plan in turn, a launch of its own; a plan that fails says why and the next is tried. shape: a name of SHAPES, or a
    folder with a config.json."""
    with tempfile.TemporaryDirectory(prefix="ladder-bench-") as scratch:
        folder = Path(scratch)
        model = folder / "model"
        _write_model(shape, model)
        packed: dict[tuple[int, float], Path] = {}
        for number, plan in enumerate(chosen):
            key = (plan.capacity, plan.supervised)
            if key not in packed:
                packed[key] = folder / f"packed-{len(packed)}"
                vocabulary = read_json(model / "config.json", "the shape")["vocab_size"]
                _write_packed(packed[key], plan, vocabulary, rows=8 * ranks * max(p.micro_batch * p.accumulation for p in chosen))
            yield _measure(plan, ranks, model, packed[key], folder / f"run-{number}", time_limit)


def table(shape: str, ranks: int, measured: Sequence[Measured]) -> str:
    """The figures for a terminal."""
    lines = [
        f"{shape}, {ranks} rank{'s' if ranks > 1 else ''}",
        FORMULA,
        "",
        f"{'plan':38} {'tokens/s/GPU':>12} {'MFU':>6} {'s/step':>7} {'peak GiB':>9} {'reserved':>9} {'comm':>6}",
    ]
    for row in measured:
        if row.failed:
            lines.append(f"{row.plan.name:38} {row.failed}")
            continue
        share = f"{row.communication_share:.0%}" if row.communication_share is not None else "-"
        mfu = f"{row.mfu:.3f}" if row.mfu is not None else "-"
        lines.append(
            f"{row.plan.name:38} {row.tokens_per_second:12,.0f} {mfu:>6} {row.seconds_per_step:7.3f} {row.peak_gib:9.1f} "
            f"{row.reserved_gib:9.1f} {share:>6}"
        )
    return "\n".join(lines)


def as_json(shape: str, ranks: int, measured: Sequence[Measured]) -> str:
    """All of it, for a file."""
    rows = [{**asdict(row.plan), **{k: v for k, v in asdict(row).items() if k != "plan"}} for row in measured]
    return json.dumps({"shape": shape, "ranks": ranks, "formula": FORMULA, "plans": rows}, indent=2)


def _measure(plan: Plan, ranks: int, model: Path, packed: Path, run: Path, time_limit: float) -> Measured:
    params = _params(plan, ranks, cpu=not gpus_found())
    try:
        profile = _profile(plan, ranks)
        spec = make_spec(
            "0" * 64, params, profile, model=model, packed=packed, run=run, steps=WARM + TIMED + 2, checkpoint_every=10**6
        )
        result = start(
            spec, module="pipeline.planning.training_bench_rank", arguments=[str(WARM), str(TIMED)], time_limit=time_limit
        )
    except RunFailed as error:
        return Measured(plan, failed=str(error).splitlines()[0].replace(f"{run}: ", ""))
    except (LadderError, ValidationError) as error:
        return Measured(plan, failed=" ".join(str(error).split()))
    return Measured(plan, **{k: result[k] for k in Measured.__dataclass_fields__ if k in result})


def _profile(plan: Plan, ranks: int) -> Profile:
    stated = {
        "launcher": "local",
        "device": "auto",
        "ranks": ranks,
        "threads_per_rank": "auto",
        "micro_batch": plan.micro_batch,
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
        "checkpoint_every": 1,
        "environment": {},
    }
    return Profile.model_validate({**stated, **plan.profile})


def _params(plan: Plan, ranks: int, *, cpu: bool) -> TrainParams:
    return TrainParams.model_validate(
        {
            "tuning": {"kind": "full"},
            "precision": {"compute": "fp32" if cpu else "bf16", "masters": "fp32", "embeddings": "compute"},
            "global_batch": plan.micro_batch * plan.accumulation * ranks,
            "epochs": 1,
            "learning_rate": 1e-5,
            "schedule": "constant",
            "warmup_share": 0.0,
            "weight_decay": 0.01,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "clipping": {"kind": "fixed", "max_norm": 1.0},
            "seed": 1,
            "deepspeed_override": {},
        }
    )


def _write_model(shape: str, folder: Path) -> None:
    """A configuration and the smallest tokenizer the trainer takes; the weights are drawn on the device."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    if shape in SHAPES:
        config = {**SHAPES[shape], "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "use_cache": False}
    elif (Path(shape) / "config.json").is_file():
        config = read_json(Path(shape) / "config.json", "the shape")
    else:
        raise ConfigError(f"--shape {shape}: neither {', '.join(SHAPES)} nor a folder with a config.json; use one of these")
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    write_json(folder / "config.json", config)
    read_shape(folder)


def _write_packed(folder: Path, plan: Plan, vocabulary: int, rows: int) -> None:
    """Rows of random tokens in documents of the stated lengths."""
    import pyarrow as pa

    draw = np.random.default_rng(0)
    count = int(rows * plan.capacity / 400)
    lengths = np.clip(draw.lognormal(np.log(350), 0.9, count), 32, plan.capacity).astype(np.int64)
    packing = best_fit_decreasing(lengths, plan.capacity)
    made: list[dict[str, Any]] = []
    for sequence in range(min(rows, packing.sequences)):
        documents = packing.documents[packing.offsets[sequence] : packing.offsets[sequence + 1]]
        sizes = lengths[documents]
        ids = draw.integers(3, min(vocabulary, 500), int(sizes.sum())).astype(np.int32)
        labels = ids.copy()
        bounds = np.cumsum(sizes)
        for begin, size in zip(bounds - sizes, sizes, strict=True):
            labels[begin : begin + round(size * (1 - plan.supervised))] = IGNORED
        made.append(
            {
                "input_ids": ids,
                "labels": labels,
                "seq_lengths": sizes,
                "documents": documents,
                "first_parts": np.zeros_like(sizes),
            }
        )
    order = draw.permutation(len(made))
    columns = {name: [made[i][name] for i in order] for name in made[0]}
    schema = pa.schema({name: pa.list_(pa.int32()) for name in columns})
    with publish(folder, {"max_length": plan.capacity}) as target:
        for split, take in (("train", len(made)), ("validation", 0)):
            with pa.OSFile(str(target / f"{split}-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                cut = {name: [value.astype(np.int32) for value in values[:take]] for name, values in columns.items()}
                writer.write_table(pa.table(cut, schema=schema), max_chunksize=64)
