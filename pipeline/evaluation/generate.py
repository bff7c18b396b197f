"""Held-out loss and greedy answers of one model folder.

Contract: prompts are the parts the format stage rendered, tokenised as they were for training, and documents are those of
the packed set. Decoding is greedy, in fp32 on CPU or in bf16 on a GPU. An answer has stopped when the model wrote the stop
token within the limit. Memory is bounded by `batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipeline.config.errors import ModelError
from pipeline.dataset.masking import IGNORED, Document, PartTokenizer, tokenise


@dataclass(frozen=True)
class Answer:
    text: str
    stopped: bool


def load(folder: Path) -> Any:
    """The model of a folder, on the first GPU if there is one."""
    cuda = torch.cuda.is_available()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: transformers cannot load it: {str(error).splitlines()[0]}; run `dvc repro`") from error
    return model.to("cuda" if cuda else "cpu").eval()


def answers(
    model: Any, prompts: Sequence[str], tokenizer: PartTokenizer, stop: int, *, max_new_tokens: int, batch: int
) -> list[Answer]:
    """Greedy answers, in order. Prompts of like length run together; shorter ones are padded on the left and masked."""
    ids = [document.input_ids for document in tokenise([[p] for p in prompts], tokenizer)]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found: dict[int, Answer] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(ids[i]) for i in chosen)
        padded = torch.full((len(chosen), width), stop)
        mask = torch.zeros_like(padded)
        for row, i in enumerate(chosen):
            padded[row, width - len(ids[i]) :] = torch.tensor(ids[i])
            mask[row, width - len(ids[i]) :] = 1
        with torch.no_grad():
            output = model.generate(
                input_ids=padded.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=stop,
            )
        for i, new in zip(chosen, output[:, width:].tolist(), strict=True):
            stopped = stop in new
            kept = new[: new.index(stop)] if stopped else new
            found[i] = Answer(tokenizer.tokenizer.decode(kept, skip_special_tokens=False), stopped)
    return [found[i] for i in range(len(ids))]


def loss(model: Any, documents: Iterable[Document]) -> float:
    """Mean negative log-likelihood per supervised token (nats) of documents, each by itself."""
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([document.input_ids], device=model.device)
        labels = torch.tensor(document.labels[1:], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        count += document.supervised
    return total / count
