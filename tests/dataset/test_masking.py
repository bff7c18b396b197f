"""Parts to ids and labels.

Would catch: a first answer token that is not trained on because it merged with the prompt, a prompt piece that is; a
missing, doubled or invented stop token; a start token that is doubled or missing; padding or prompt ids in the labels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pipeline.config.errors import ModelError
from pipeline.dataset.convert import Example
from pipeline.dataset.masking import IGNORED, Document, PartTokenizer, load_tokenizer, tokenise, truncated
from pipeline.dataset.templates import load_template
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
    tokenizer, template = load_tokenizer(base_model), load_template("chat", base_model)
    examples = [Example("f:1", r["instruction"], r["input"], r["output"]) for r in rows(24)]
    documents = tokenise([template.render(e) for e in examples], tokenizer)
    stop = tokenizer.id_of(template.stop_token)
    for example, document in zip(examples, documents, strict=True):
        assert tokenizer.tokenizer.decode(_supervised(document), skip_special_tokens=False) == example.output + "<|end|>"
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
