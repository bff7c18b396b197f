"""Parts to ids and labels.

Would catch: a first answer token that is not trained on because it merged with the prompt, a prompt piece that is; a
missing, doubled or invented stop token; a start token that is doubled or missing; padding or prompt ids in the labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pipeline.config.errors import ModelError
from pipeline.dataset.masking import (
    IGNORED,
    Document,
    PartTokenizer,
    hugging_face,
    load_tokenizer,
    merged,
    tokenise,
    truncated,
)
from tests.workspace import rows

pytestmark = pytest.mark.unit

STOP = "</s>"
CORPUS = [
    "Answer: yes. Answer: no. The answer is yes. ",
    "答案：是的。答案：不是。",
    "答えは はいです。",
    "🙂 😀 🙂‍↔️ naïve café",
] * 20


def _tokenizer(processor: str | None = None, *, boundaries: bool = True) -> Tokenizer:
    """A byte-level BPE; without word boundaries anything that stands together often merges, spaces and borders too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=boundaries)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", STOP, "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if processor is not None:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=processor, special_tokens=[("<s>", tokenizer.token_to_id("<s>")), (STOP, tokenizer.token_to_id(STOP))]
        )
    return tokenizer


def _loaded(tokenizer: Tokenizer, folder: Path) -> PartTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def _supervised(document: Document) -> list[int]:
    return [label for label in document.labels if label != IGNORED]


BORDERS = {
    "space": ("The answer is ", "yes."),
    "full stop": ("Answer:.", ". no"),
    "letter": ("The answ", "er is yes"),
    "word": ("Answer: y", "es"),
    "newline": ("Answer:\n", "\nyes\n"),
    "chinese": ("答案：", "是的。"),
    "chinese full stop": ("答案：是的。", "。不是"),
    "half a chinese word": ("答", "案：不是。"),
    "japanese": ("答えは ", "はいです。"),
    "emoji": ("🙂", "🙂‍↔️"),
    "combining accent": ("cafe", "\u0301 naïve"),
    "joined emoji": ("🙂\u200d", "↔️ 😀"),
    "digits": ("12", "34"),
    "spaces of the answer": ("Answer:", "  yes  "),
}


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> PartTokenizer:
    return _loaded(_tokenizer(boundaries=False), tmp_path_factory.mktemp("merging"))


def test_the_borders_do_merge(merging: PartTokenizer) -> None:
    """Else the next test would prove nothing: tokenised as one text, most borders lie inside a token."""
    tokenizer = merging.tokenizer
    merged = 0
    for prompt, answer in BORDERS.values():
        apart = tokenizer.encode(prompt, add_special_tokens=False).ids + tokenizer.encode(answer, add_special_tokens=False).ids
        merged += tokenizer.encode(prompt + answer, add_special_tokens=False).ids != apart
    assert merged >= 5


@pytest.mark.parametrize(("prompt", "answer"), BORDERS.values(), ids=BORDERS)
def test_supervised_is_the_answer_and_one_stop(prompt: str, answer: str, merging: PartTokenizer) -> None:
    (document,) = tokenise([(prompt, answer + STOP)], merging)
    assert merging.tokenizer.decode(_supervised(document), skip_special_tokens=False) == answer + STOP
    assert _supervised(document).count(merging.id_of(STOP)) == 1
    asked = merging.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert document.input_ids[: len(asked)] == asked
    assert document.labels[: len(asked)] == [IGNORED] * len(asked)
    assert document.input_ids[len(asked) :] == _supervised(document)
    assert merging.tokenizer.decode(document.input_ids, skip_special_tokens=False) == prompt + answer + STOP


def test_the_shipped_base_in_every_language(base_model: Path) -> None:
    tokenizer = load_tokenizer(base_model)
    parts = [(f"<|user|>{r['instruction']}\n{r['input']}<|end|><|assistant|>", r["output"] + "<|end|>") for r in rows(24)]
    stop = tokenizer.id_of("<|end|>")
    for (prompt, answer), document in zip(parts, tokenise(parts, tokenizer), strict=True):
        assert tokenizer.tokenizer.decode(_supervised(document), skip_special_tokens=False) == answer
        assert tokenizer.tokenizer.decode(document.input_ids, skip_special_tokens=False) == prompt + answer
        assert [document.input_ids.count(tokenizer.id_of(t)) for t in ("<|user|>", "<|assistant|>", "<|end|>")] == [1, 1, 2]
        assert document.labels[-1] == document.input_ids[-1] == stop
        assert len(document.input_ids) == len(document.labels)
        assert all(label in (IGNORED, token) for token, label in zip(document.input_ids, document.labels, strict=True))


def test_turns_alternate(merging: PartTokenizer) -> None:
    (document,) = tokenise([("a", "b" + STOP, "c", "d" + STOP)], merging)
    assert merging.tokenizer.decode(_supervised(document), skip_special_tokens=False) == "b" + STOP + "d" + STOP


@pytest.mark.parametrize("processor", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("prompt", ["Answer: ", "<s>Answer: "])
def test_one_start_token_whoever_writes_it(processor: str, prompt: str, tmp_path: Path) -> None:
    tokenizer = _loaded(_tokenizer(processor), tmp_path)
    (document,) = tokenise([(prompt, "yes" + STOP)], tokenizer)
    start = tokenizer.id_of("<s>")
    assert document.input_ids[0] == start
    assert document.input_ids.count(start) == 1
    assert document.input_ids.count(tokenizer.id_of(STOP)) == 1
    assert document.labels[0] == IGNORED
    assert tokenizer.tokenizer.decode(document.input_ids, skip_special_tokens=False) == f"<s>Answer: yes{STOP}"


@pytest.mark.parametrize("processor", [None, "$A", "$A </s>"])
def test_no_start_token_where_the_tokenizer_adds_none(processor: str | None, tmp_path: Path) -> None:
    tokenizer = _loaded(_tokenizer(processor), tmp_path)
    (document,) = tokenise([("Answer: ", "yes" + STOP)], tokenizer)
    assert tokenizer.start == ()
    assert tokenizer.tokenizer.decode(document.input_ids, skip_special_tokens=False) == "Answer: yes" + STOP


def test_start_token_of_an_empty_prompt(tmp_path: Path) -> None:
    tokenizer = _loaded(_tokenizer("<s> $A"), tmp_path)
    (document,) = tokenise([("", "yes" + STOP)], tokenizer)
    assert document.input_ids[0] == tokenizer.id_of("<s>")
    assert tokenizer.tokenizer.decode(_supervised(document), skip_special_tokens=False) == "yes" + STOP


def _marked(documents: Sequence[Sequence[str]], tokenizer: PartTokenizer) -> list[bool]:
    inside = hugging_face(Tokenizer.from_str(tokenizer.prefix.inside)) if tokenizer.prefix else None
    return merged(documents, tokenizer, hugging_face(tokenizer.tokenizer), inside).tolist()


@pytest.mark.parametrize("parts", [("The answ", "er is yes."), ("Answer: y", "es"), ("a", "b", "The answ", "er is")])
def test_a_merged_border_is_marked(parts: tuple[str, ...], merging: PartTokenizer) -> None:
    far = "Answer: no. " * 20
    assert _marked([parts, (far + parts[0], *parts[1:-1], parts[-1] + far)], merging) == [True, True]
    assert _marked([["".join(parts)]], merging) == [False]
    stopped = [part + STOP for part in parts]  # nothing merges with a special token
    assert _marked([stopped], merging) == [False]


def test_merged_documents_are_told_from_their_neighbours(merging: PartTokenizer) -> None:
    documents = [("Q" + STOP, "a"), ("The answ", "er is yes."), ("", ""), ("Answer: y", "es"), ("x" + STOP, "The answer is ")]
    assert _marked(documents, merging) == [False, True, False, True, False]
    assert _marked([], merging) == []


@pytest.mark.parametrize(("prompt", "answer"), BORDERS.values(), ids=BORDERS)
def test_marked_is_what_the_whole_text_says(prompt: str, answer: str, merging: PartTokenizer) -> None:
    (document,) = tokenise([(prompt, answer)], merging)
    joined = merging.tokenizer.encode(prompt + answer, add_special_tokens=False).ids
    assert _marked([(prompt, answer)], merging) == [document.input_ids != joined]


PREFIXES = {
    "llama 2": ("prepend", None),
    "metaspace, at the start": (None, "first"),
    "metaspace, after every token": (None, "always"),
    "byte level": (None, "bytes"),
}


def _prefixing(kind: str, folder: Path, processor: str | None = "<s> $A") -> PartTokenizer:
    """A tokenizer that puts a space before every text it is given, as those of Llama 2, Mistral, Yi or GPT-J's kin do."""
    normalizer, scheme = PREFIXES[kind]
    tokenizer = Tokenizer(models.BPE(byte_fallback=scheme != "bytes"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if scheme == "bytes" else [f"<0x{i:02X}>" for i in range(256)]
    if scheme == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme or "always")  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", STOP, *([] if scheme == "bytes" else alphabet)],
        initial_alphabet=alphabet if scheme == "bytes" else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for text in CORPUS for line in text.split(". ")], trainer)
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [t for t in stored["added_tokens"] if t["content"] in ("<s>", STOP)]
    if normalizer:  # trained with word borders, which this form keeps in the vocabulary alone
        stored["pre_tokenizer"] = None
        steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        stored["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    if processor:
        start = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single=processor, special_tokens=start)  # pyright: ignore
    return _loaded(tokenizer, folder)


INSIDE = {
    "text": ("Answer:", " yes" + STOP),
    "line": ("The answer is\n", "yes" + STOP),
    "chinese": ("答案：", "是的。" + STOP),
    "after a token": ("Answer" + STOP, "yes" + STOP),
    "space after a token": ("Answer" + STOP, " yes" + STOP),
    "begins with a token": ("Answer:", STOP),
    "turns": ("The", " answer" + STOP, "\nis", " no." + STOP + "\n", "The answer\n", "is yes." + STOP),
    "tokens within": ("<s>The" + STOP + "answer" + STOP + " is", " yes" + STOP + "no" + STOP),
    "nothing asked": ("", "yes" + STOP),
}


@pytest.mark.parametrize("kind", PREFIXES)
@pytest.mark.parametrize("parts", INSIDE.values(), ids=INSIDE)
def test_a_part_inside_has_the_ids_of_the_joined_text(parts: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    tokenizer = _prefixing(kind, tmp_path)
    assert tokenizer.prefix is not None
    (document,) = tokenise([parts], tokenizer)
    start = tokenizer.id_of("<s>")
    joined = tokenizer.tokenizer.encode("".join(parts), add_special_tokens=False).ids
    assert document.input_ids == (joined if joined[0] == start else [start, *joined])
    assert _marked([parts], tokenizer) == [False]
    assert document.input_ids.count(start) == 1
    assert _supervised(document).count(tokenizer.id_of(STOP)) == sum(p.count(STOP) for p in parts[1::2])


@pytest.mark.parametrize("kind", PREFIXES)
def test_the_prefix_space_is_there_to_be_avoided(kind: str, tmp_path: Path) -> None:
    """Else the test above would hold for parts tokenised each by itself."""
    tokenizer = _prefixing(kind, tmp_path)
    differing = 0
    for parts in INSIDE.values():
        apart = [i for part in parts for i in tokenizer.tokenizer.encode(part, add_special_tokens=False).ids]
        differing += apart != tokenizer.tokenizer.encode("".join(parts), add_special_tokens=False).ids
    assert differing >= 3


@pytest.mark.parametrize("kind", PREFIXES)
def test_a_prompt_that_ends_in_a_space_is_marked_and_keeps_its_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = _prefixing(kind, tmp_path)
    parts = ("Answer: ", "yes" + STOP)
    assert _marked([parts], tokenizer) == [True]
    (document,) = tokenise([parts], tokenizer)
    asked = tokenizer.tokenizer.encode(parts[0]).ids
    assert document.input_ids[: len(asked)] == asked
    assert str(tokenizer.tokenizer.id_to_token(_supervised(document)[0]))[0] not in "▁Ġ"


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    """Some published tokenizer files carry the limits of the last call that was made with them."""
    stored = _tokenizer()
    stored.enable_truncation(4)
    stored.enable_padding(length=64, pad_token="<pad>", pad_id=2)
    tokenizer = _loaded(stored, tmp_path)
    (document,) = tokenise([("The answer is " * 5, "yes" + STOP)], tokenizer)
    assert tokenizer.tokenizer.decode(document.input_ids, skip_special_tokens=False) == "The answer is " * 5 + "yes" + STOP


def test_a_truncated_row_gets_no_stop(merging: PartTokenizer) -> None:
    (document,) = tokenise([("Answer: ", "yes. The answer is no." + STOP)], merging)
    for length in range(1, len(document.input_ids)):
        cut = truncated(document, length)
        assert cut.input_ids == document.input_ids[:length]
        assert cut.labels == document.labels[:length]
        assert merging.id_of(STOP) not in cut.input_ids
    assert truncated(document, len(document.input_ids)) == document


def test_supervised_counts_what_is_predicted() -> None:
    """The first position has nothing before it, so nothing predicts it."""
    assert Document([1, 2, 3], [IGNORED, 2, 3]).supervised == 2
    assert Document([1, 2, 3], [1, 2, 3]).supervised == 2
    assert Document([1, 2], [IGNORED, IGNORED]).supervised == 0


def test_batches_keep_order(merging: PartTokenizer) -> None:
    parts = [(f"q{i}", f"a{i}" + STOP) for i in range(300)]
    together = tokenise(parts, merging)
    assert together == [tokenise([p], merging)[0] for p in parts]
    assert tokenise([], merging) == []


def test_unknown_stop_token(merging: PartTokenizer) -> None:
    with pytest.raises(ModelError, match=r"stop token '<\|nope\|>' is not in the tokenizer's vocabulary"):
        merging.id_of("<|nope|>")
