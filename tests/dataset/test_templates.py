"""Examples to text parts.

Would catch: text that differs from what transformers renders for the same tokenizer (so that training and serving see
two formats), a wrong or missing stop token, an answer found at the wrong place, a prompt that changes once the answer is
known, a template that breaks out of its sandbox or depends on the clock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.artifact import digest_text
from pipeline.config.errors import DataError, LadderError, ModelError
from pipeline.dataset.conversation import Conversation, Turn
from pipeline.dataset.rendering import special_tokens
from pipeline.dataset.templates import Template, load_template

pytestmark = pytest.mark.unit

SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|eot|><|x|>")

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_SYSTEM = (
    "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- if tools %}\n    {{- tools | tojson }}\n{%- endif %}\n" + CHATML
)
THINKING = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
    "        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}\n"
    "    {%- else %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
DATED = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    "        {%- set date_string = strftime_now('%d %b %Y') %}\n    {%- else %}\n"
    "        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- endif %}\n"
    "{{- '<|head|>system<|/head|>\\n\\nToday Date: ' + date_string + '\\n\\n<|eot|>' }}\n"
    "{%- if not tools is defined %}{%- set tools = 'unset' %}{%- endif %}\n"
    "{%- if tools is not none %}{{- 'tools' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|/head|>\\n\\n' }}\n{%- endif %}\n"
)
MARKED = (
    "{% for message in messages %}\n    {% if message.role == 'assistant' %}\n<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n\n"
    "    {% else %}\n<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\n    {% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
)
SPACED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}"
    "{% endif %}{% endfor %}"
)
LOOPS = (
    "{% for message in messages %}{% if message.role == 'nobody' %}{% continue %}{% endif %}"
    "{{ {'角色': message.role} | tojson(separators=(',', ':')) }}<|im_start|>{{ message.content }}<|im_end|>"
    "{% if not loop.last %}{% continue %}{% endif %}{% break %}{% endfor %}"
    "{% if add_generation_prompt %}{{ {'角色': 'assistant'} | tojson(separators=(',', ':')) }}<|im_start|>{% endif %}"
)
NAMESPACE = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}" + CHATML

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "system": (CHATML_SYSTEM, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "dated": (DATED, "<|eot|>"),
    "marked": (MARKED, "<|im_end|>"),
    "spaced": (SPACED, "</s>"),
    "loops": (LOOPS, "<|im_end|>"),
    "namespace": (NAMESPACE, "<|im_end|>"),
}


def asked(place: str, instruction: str, context: str, output: str) -> Conversation:
    """One question and its answer."""
    return Conversation(place, (Turn("user", instruction, context), Turn("assistant", output, "", True)))


EXAMPLES = {
    "plain": asked("f:1", "Name a colour.", "", "blue"),
    "input": asked("f:1", "翻译成英文：", "第三只猫", "the third cat。"),
    "many lines": asked("f:1", "a\nb\n\nc", "{{ messages }} {% raw %}", "one\n\n  two\n\tthree"),
    "japanese": asked("f:1", "数えてください。", "りんご", "三個です。"),
    "emoji": asked("f:1", "😀?", "", "🙂‍↔️ é"),
    "answer within the frame": asked("f:1", "q", "", "in"),
    "answer is a mark of the frame": asked("f:1", "q", "", "assistant"),
    "answer repeats the question": asked("f:1", "echo", "echo", "echo"),
    "answer is one letter": asked("f:1", "q", "", "t"),
    "html": asked("f:1", "<b> & 'quotes' \"double\"", "", "<i>&amp;</i>"),
}


def save(folder: Path, template: str | None, **tokens: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a chat template, saved as transformers saves it."""
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bytes_only.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    bytes_only.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, clean_up_tokenization_spaces=False, **tokens)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def _messages(conversation: Conversation, *, answered: bool) -> list[dict[str, str]]:
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
    return messages if answered else messages[:-1]


def _load(name: str, model: Path, own: str | None = None, **policies: Any) -> Template:
    return load_template(name, own, model, **policies)


def _row(template: Template, conversation: Conversation) -> tuple[str, ...]:
    """The one row of a conversation; twice, since the frame of its shape is made at the first."""
    (first,), (second,) = template.rows(conversation), template.rows(conversation)
    assert first == second
    return first


@pytest.fixture(scope="module", params=TEMPLATES)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A model folder with a template, its tokenizer read back by transformers, and the token that ends a turn."""
    source, stop = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp("chat")
    save(folder, source, bos_token="<|begin|>", eos_token="</s>", pad_token="<pad>")
    return folder, AutoTokenizer.from_pretrained(folder), stop


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_text_is_what_transformers_renders(chat: tuple[Path, Any, str], example: Conversation) -> None:
    folder, tokenizer, stop = chat
    prompt, answer = _row(_load("chat", folder), example)
    fixed: dict[str, Any] = {"tokenize": False, "date_string": "26 Jul 2024"}
    whole = tokenizer.apply_chat_template(_messages(example, answered=True), **fixed)
    asked = tokenizer.apply_chat_template(_messages(example, answered=False), add_generation_prompt=True, **fixed)
    assert answer == example.turns[-1].content + stop
    assert prompt.startswith(asked)
    between, _, rest = whole.removeprefix(prompt + example.turns[-1].content).partition(stop)
    assert (prompt + example.turns[-1].content + between + stop + rest) == whole
    assert between.strip() == ""
    assert rest.strip() == ""


def test_ids_of_the_prompt_are_those_of_serving(chat: tuple[Path, Any, str]) -> None:
    """Transformers' tokenising call gives the same ids as the rendered prompt."""
    folder, tokenizer, _ = chat
    example = EXAMPLES["input"]
    prompt = _row(_load("chat", folder), example)[0]
    ids = tokenizer.apply_chat_template(
        _messages(example, answered=False), add_generation_prompt=True, date_string="26 Jul 2024", return_dict=False
    )
    assert len(ids) > 20
    assert tokenizer.encode(prompt, add_special_tokens=False)[: len(ids)] == ids


def test_shipped_base(base_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    template = _load("chat", base_model)
    assert template.stop_token == tokenizer.eos_token == "<|end|>"
    for example in EXAMPLES.values():
        whole = tokenizer.apply_chat_template(_messages(example, answered=True), tokenize=False)
        assert "".join(_row(template, example)) == whole
    assert _row(template, EXAMPLES["input"]) == ("<|user|>翻译成英文：\n第三只猫<|end|><|assistant|>", "the third cat。<|end|>")


def test_shipped_base_knows_its_special_tokens(base_model: Path) -> None:
    assert special_tokens(base_model) == ("<|assistant|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>")


@pytest.mark.parametrize(
    ("template", "answer", "kept"), [(DATED, "\n 4 ", "4"), (SPACED, " a b\n", "a b"), (CHATML, "\n 4 ", "\n 4 ")]
)
def test_a_template_that_strips_is_followed(template: str, answer: str, kept: str, tmp_path: Path) -> None:
    tokenizer = save(tmp_path, template, bos_token="<|begin|>", eos_token="</s>")
    example = asked("f:1", "q", "", answer)
    loaded = _load("chat", tmp_path)
    prompt, text = _row(loaded, example)
    assert text == kept + loaded.stop_token
    whole = tokenizer.apply_chat_template(_messages(example, answered=True), tokenize=False, date_string="26 Jul 2024")
    assert isinstance(whole, str)
    assert whole.startswith(prompt + kept)


def test_longest_stop_token_wins(tmp_path: Path) -> None:
    save(tmp_path, CHATML.replace("'<|im_end|>'", "'<|eot|><|x|>'"), eos_token="</s>")
    assert _load("chat", tmp_path).stop_token == "<|eot|><|x|>"


def test_stop_token_is_the_template_s_not_the_tokenizer_s(tmp_path: Path) -> None:
    save(tmp_path, CHATML, eos_token="</s>")
    template = _load("chat", tmp_path)
    assert template.stop_token == "<|im_end|>"
    assert template.digest == digest_text(CHATML)


BROKEN = {
    "no stop token": (CHATML.replace("'<|im_end|>'", "'###'"), ModelError, ["###", "no special token", "alpaca_en"]),
    "nothing after the answer": (CHATML.replace("+ '<|im_end|>' + '\\n'", ""), ModelError, ["no special token"]),
    "another prompt with an answer": (
        "{% if messages|length > 1 %}x{% endif %}" + CHATML,
        LadderError,
        ["another prompt", "alpaca_en"],
    ),
    "answer in capitals": (
        CHATML.replace("message['content']", "message['content'] | upper"),
        LadderError,
        ["changes the answer"],
    ),
    "answer left out": (CHATML.replace("message['content']", "'x'"), LadderError, ["changes the answer"]),
    "refuses": ("{{ raise_exception('no thanks') }}", LadderError, ["no thanks", "alpaca_en"]),
    "syntax": ("{% for message in messages %}", LadderError, ["alpaca_en"]),
    "unknown tag": ("{% nonsense %}", LadderError, ["nonsense"]),
    "type error": ("{{ 'a' + 1 }}", LadderError, ["alpaca_en"]),
    "division": ("{{ 1 / 0 }}", LadderError, ["alpaca_en"]),
    "undefined": ("{{ nothing.there }}", LadderError, ["nothing"]),
    "clock without a guard": ("{{ strftime_now('%Y') }}" + CHATML, LadderError, ["strftime_now"]),
    "python's classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", LadderError, ["__class__", "unsafe"]),
    "attributes by filter": ("{{ ('' | attr('__class__')).mro() }}", LadderError, []),
    "globals of a function": ("{{ raise_exception.__globals__.keys() }}", LadderError, ["__globals__", "unsafe"]),
    "changes the messages": ("{{ messages.append('x') }}" + CHATML, LadderError, ["append"]),
    "files": ("{% include '/etc/hosts' %}", LadderError, []),
    "endless": ("{% for i in range(10**9) %}{% endfor %}", LadderError, ["range"]),
}


@pytest.mark.parametrize(("template", "kind", "needed"), BROKEN.values(), ids=BROKEN)
def test_a_template_that_does_not_fit_is_a_clear_error(
    template: str, kind: type[LadderError], needed: list[str], tmp_path: Path
) -> None:
    save(tmp_path, template, eos_token="</s>")
    with pytest.raises(kind) as caught:
        _load("chat", tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert [n for n in needed if n not in message] == [], message


def test_an_attribute_that_is_only_printed_is_nothing(tmp_path: Path) -> None:
    save(tmp_path, "[{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format('') }}]" + CHATML, eos_token="</s>")
    prompt, _ = _row(_load("chat", tmp_path), EXAMPLES["plain"])
    assert prompt.startswith("[]<|im_start|>")


def test_an_answer_that_one_row_loses_names_the_row(tmp_path: Path) -> None:
    save(tmp_path, THINKING, eos_token="</s>")
    template = _load("chat", tmp_path)
    with pytest.raises(DataError, match=r"^f:9: the chat template changes the answer"):
        _row(template, asked("f:9", "q", "", "thought</think>answer"))


def test_no_chat_template(tmp_path: Path) -> None:
    save(tmp_path, None, eos_token="</s>")
    with pytest.raises(ModelError, match="no chat template; use 'alpaca_en'"):
        _load("chat", tmp_path)


def test_alpaca_needs_an_end_token(tmp_path: Path) -> None:
    save(tmp_path, CHATML)
    with pytest.raises(ModelError, match="no eos token"):
        _load("alpaca_zh", tmp_path)


ALPACA = {
    "alpaca_en": (
        "Complete the task that the instruction describes.\n\n### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n",
        "Complete the task that the instruction describes.\n\n### Instruction:\nQ\n\n### Response:\n",
    ),
    "alpaca_zh": (
        "请完成下面的指令所描述的任务。\n\n### 指令:\nQ\n\n### 输入:\nI\n\n### 响应:\n",
        "请完成下面的指令所描述的任务。\n\n### 指令:\nQ\n\n### 响应:\n",
    ),
}


@pytest.mark.parametrize("name", ALPACA)
def test_alpaca_text_to_the_letter(name: str, tmp_path: Path) -> None:
    save(tmp_path, None, eos_token="</s>")
    template = _load(name, tmp_path)
    with_input, without = ALPACA[name]
    assert _row(template, asked("f:1", "Q", "I", "A")) == (with_input, "A</s>")
    assert _row(template, asked("f:1", "Q", "", "A")) == (without, "A</s>")
    assert (template.name, template.stop_token) == (name, "</s>")


@pytest.mark.parametrize("name", ALPACA)
def test_alpaca_leaves_text_alone(name: str, tmp_path: Path) -> None:
    save(tmp_path, None, eos_token="</s>")
    prompt, answer = _row(_load(name, tmp_path), asked("f:1", " <b>&\n{{ x }}", "0", "\n a \n"))
    assert ":\n <b>&\n{{ x }}\n" in prompt
    assert ":\n0\n" in prompt
    assert answer == "\n a \n</s>"


def test_end_token_in_the_long_form(tmp_path: Path) -> None:
    """Older tokenizer configurations write special tokens as objects."""
    save(tmp_path, None, eos_token="</s>")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": {"content": "<|eot|>", "lstrip": False}}))
    assert _load("alpaca_en", tmp_path).stop_token == "<|eot|>"
