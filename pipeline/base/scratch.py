"""A base model from nothing: a byte-level BPE trained on the raw text and a Llama with random weights.

Contract: the same files, parameters and library versions give the same bytes. Digits are tokens of their own, so that
numbers of any length are made of ten symbols. The chat template marks turns by one special token each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config.errors import ConfigError
from pipeline.config.params import ScratchBase
from pipeline.dataset.convert import EVIDENCE_ROWS, Converter, detect
from pipeline.dataset.reading.read import Record, Reject, find_files, read_rows
from pipeline.dataset.reading.record import next_rows
from pipeline.dataset.screening import Screen, Screened

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(params: ScratchBase, raw: Path, folder: Path) -> None:
    """Write model and tokenizer into `folder`."""
    trained = _train_tokenizer(_texts(find_files(raw, params.corpus)), params)
    import torch  # seconds, which an error above need not take
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=END,
        pad_token=PAD,
        model_max_length=params.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=params.hidden_size,
        intermediate_size=params.intermediate_size,
        num_hidden_layers=params.num_hidden_layers,
        num_attention_heads=params.num_attention_heads,
        num_key_value_heads=params.num_attention_heads,
        max_position_embeddings=params.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    torch.manual_seed(params.seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ids[END], pad_token_id=ids[PAD])
    model.save_pretrained(folder)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    """Every text of every usable row; a broken row teaches the tokenizer nothing."""
    screen = Screen((PAD, END, *ROLES), "reject", strip=False)
    for path in files:
        records = (row for row in read_rows(path) if isinstance(row, Record))
        head = next_rows(records, EVIDENCE_ROWS)
        form = detect(head, {})
        if form is None:
            continue
        converter = Converter(form, {})
        for record in itertools.chain(head, records):
            found = converter.convert(record)
            for conversation in [] if isinstance(found, Reject) else found:
                if isinstance(screen.check(conversation), Screened):
                    yield from conversation.texts()


def _train_tokenizer(texts: Iterator[str], params: ScratchBase) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=params.vocab_size,
        special_tokens=[PAD, *ROLES, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > params.vocab_size:
        raise ConfigError(
            f"base.vocab_size = {params.vocab_size}: the bytes and special tokens alone are "
            f"{tokenizer.get_vocab_size()}; raise it"
        )
    return tokenizer
