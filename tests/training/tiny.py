"""A tiny Llama, packed rows and specs for tests that train, and the plain loop that they are held against.

`reference` is what training means: each document by itself, cross-entropy from the logits, the mean over the supervised tokens
of the global batch, torch's own clipping and AdamW. Of the training code it uses the data order, the rule of the clipping limit
and the adapters' configuration, which have tests of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.artifact import publish
from pipeline.dataset.manifest import shard_name
from pipeline.dataset.masking import IGNORED
from pipeline.dataset.packing import SCHEMA
from pipeline.launch.local import launch
from pipeline.training.batching import DataOrder
from pipeline.training.clipping import limit_of
from pipeline.training.precision import launcher_environment
from pipeline.training.run import make_spec
from pipeline.training.spec import Spec
from pipeline.training.tuning import adapters
from tests.training.making import profile, train_params
from tests.workspace import ROOT

CAPACITY = 48
VOCABULARY = 128
TIME_LIMIT = 300.0

Row = dict[str, Any]


def llama(**changed: Any) -> Any:
    """A configuration: two blocks of width 64, four heads on two key-value heads, tied."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # far from flat, so that attention to a wrong token would show
    }
    return LlamaConfig(**sizes | changed)


def model_of(config: Any, attention: str = "sdpa") -> Any:
    """Random fp32 weights, the same for the same configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # at this size threads wait for each other
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def write_model(folder: Path) -> Path:
    """The tiny Llama with a tokenizer of two words: training reads no text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    model_of(llama()).save_pretrained(folder)
    return folder


def row(draw: np.random.Generator, lengths: Sequence[int], supervised: Sequence[int], first_document: int) -> Row:
    """A packed row of random documents, of which the last `supervised` tokens are trained on."""
    ids = draw.integers(3, VOCABULARY, int(sum(lengths))).astype(np.int32)
    labels = ids.copy()
    for start, length, trained in zip(np.cumsum([0, *lengths[:-1]]), lengths, supervised, strict=True):
        labels[start : start + length - trained] = IGNORED
    return {
        "input_ids": ids,
        "labels": labels,
        "seq_lengths": np.asarray(lengths, np.int32),
        "documents": np.arange(first_document, first_document + len(lengths), dtype=np.int32),
        "first_parts": np.zeros(len(lengths), np.int32),
    }


def uneven_rows(count: int) -> list[Row]:
    """Rows that differ as much as rows can: a third has one supervised token, a third nearly all, the rest something between;
    one to five documents, 9 to CAPACITY tokens."""
    draw = np.random.default_rng(7)
    rows: list[Row] = []
    for number in range(count):
        lengths = draw.integers(2, 10, draw.integers(1, 6)) if number % 3 else np.asarray([draw.integers(20, CAPACITY + 1)])
        if number % 3 == 0:
            supervised = [1]
        elif number % 3 == 1:
            supervised = [int(n) - 1 for n in lengths]
        else:
            supervised = [int(draw.integers(0, n)) for n in lengths[:-1]] + [1]
        rows.append(row(draw, lengths.tolist(), supervised, first_document=10 * number))
    return rows


def write_packed(folder: Path, train: Sequence[Row], validation: Sequence[Row] = ()) -> Path:
    with publish(folder, {"max_length": CAPACITY}) as target:
        for split, rows in (("train", train), ("validation", validation)):
            table = pa.Table.from_pylist([{k: v.tolist() for k, v in r.items()} for r in rows], schema=SCHEMA)
            with pa.OSFile(str(target / shard_name(split, 0)), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
                writer.write_table(table)
    return folder


@dataclass(frozen=True)
class Set:
    """A model and packed rows on disk, with a place for runs."""

    folder: Path
    rows: Sequence[Row]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def spec(
        self,
        name: str,
        *,
        steps: int,
        params: Mapping[str, Any],
        machine: Mapping[str, Any],
        run: str | None = None,
        resume_from: str | None = None,
        packed: str = "packed",
    ) -> Spec:
        return make_spec(
            "0" * 64,
            train_params(**params),
            profile(device="cpu", **{"checkpoint_every": 1000, **machine}),
            model=self.model,
            packed=self.folder / packed,
            run=self.folder / "runs" / (run or name),
            steps=steps,
            resume_from=resume_from,
        )


def make_set(folder: Path, rows: Sequence[Row], validation: Sequence[Row] = ()) -> Set:
    write_model(folder / "model")
    write_packed(folder / "packed", rows, validation)
    return Set(folder, rows)


@dataclass(frozen=True)
class Trained:
    """What a run left: its curve, the weights by name, for each rank and step the documents seen, and the result."""

    curve: list[dict[str, Any]]
    weights: dict[str, Any]
    seen: list[list[list[int]]]
    result: dict[str, Any]

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.curve]


def train_all(folder: Path, specs: Mapping[str, Spec]) -> dict[str, Trained]:
    """Train the specs, all for the same number of ranks, one after the other in one launch."""
    from safetensors.torch import load_file

    (ranks,) = {spec.ranks for spec in specs.values()}
    cases = folder / f"cases-{ranks}.json"
    out = folder / f"out-{ranks}"
    cases.write_text(json.dumps({name: json.loads(spec.model_dump_json()) for name, spec in specs.items()}), encoding="utf-8")
    log = folder / f"ranks-{ranks}.log"
    status = launch(
        "tests.training.splits_rank",
        [str(cases), str(out)],
        ranks=ranks,
        cuda=False,
        environment={**launcher_environment(next(iter(specs.values())).params.precision), "PYTHONPATH": str(ROOT)},
        time_limit=TIME_LIMIT,
        output=log,
    )
    assert status == 0, log.read_text(encoding="utf-8")[-4000:]
    found: dict[str, Trained] = {}
    for name in specs:
        seen = [json.loads((out / name / f"seen-{rank}.json").read_text(encoding="utf-8"))["steps"] for rank in range(ranks)]
        curve = [json.loads(line) for line in (out / name / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
        result = json.loads((out / name / "result.json").read_text(encoding="utf-8"))
        found[name] = Trained(curve, load_file(out / name / "weights.safetensors"), seen, result)
    return found


def documents_of(rows: Iterable[Row]) -> list[tuple[Any, Any]]:
    """(ids, labels) of each document."""
    found: list[tuple[Any, Any]] = []
    for one in rows:
        cuts = np.cumsum(one["seq_lengths"])[:-1]
        found += zip(np.split(one["input_ids"], cuts), np.split(one["labels"], cuts), strict=True)
    return found


def plain_loss(model: Any, rows: Iterable[Row]) -> tuple[Any, int]:
    """Summed loss, with its graph, and supervised tokens of some rows, document by document."""
    import torch

    total, count = torch.zeros(()), 0
    for ids, labels in documents_of(rows):
        logits = model(input_ids=torch.tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(labels[1:], dtype=torch.long)
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        count += int((targets != IGNORED).sum())
    return total, count


def reference(made: Set, params: Mapping[str, Any], steps: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, norms before clipping and final weights of the plain loop on one process."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    torch.set_num_threads(1)
    stated = train_params(**params)
    model: Any = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32, attn_implementation="eager")
    if stated.tuning.kind != "full":
        set_seed(stated.seed)
        model = get_peft_model(model, adapters(stated.tuning))
    limit = limit_of(stated.clipping)
    betas = (stated.adam_beta1, stated.adam_beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stated.learning_rate, betas=betas, eps=stated.adam_epsilon, weight_decay=stated.weight_decay
    )
    order = list(DataOrder(len(made.rows), stated.seed, steps * stated.global_batch))
    losses, norms = [], []
    for step in range(steps):
        chosen = [made.rows[i] for i in order[step * stated.global_batch : (step + 1) * stated.global_batch]]
        total, count = plain_loss(model, chosen)
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit.limit)))
        limit.observe(norms[-1])
        losses.append(float(total.detach()) / count)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def with_path(*folders: Path) -> dict[str, str]:
    """An environment in which these folders come first, then the repository."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT)])}
