"""The property that everything rests on: what is supervised is the answers, one stop token after each, and nothing else.

Generated rows in Chinese, English, Japanese and emoji, in every form, under every template, against the answers as the
generator knows them and against transformers' rendering. Would catch: an answer found at a wrong place, a stop token lost or
doubled, a turn or a tool dropped, a frame that differs from the full rendering, text that is trimmed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline.config.errors import DataError
from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.convert import Converter, Form, detect
from pipeline.dataset.reading.record import Record
from pipeline.dataset.templates import Template, load_template
from tests.dataset.test_templates import CHATML, DATED, SPACED, THINKING, save

pytestmark = pytest.mark.unit

TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with tools, as the larger model families write it."""

FORGETS = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last %}{{- m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Drops the reasoning of answers before the last question."""

OWN = (
    "{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.instruction }}{% if m.input %} ({{ m.input }}){% endif %} [A] "
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}\n{% elif m.role == 'system' %}[S] {{ m.content }}\n"
    "{% else %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)

PIECES = (
    *(
        "the quick brown fox",
        "猫が三匹います",
        "第二，请检查。",
        "😀",
        "🙂‍↔️",
        "é",
        "e\u0301",
        "\n",
        "\n\n",
        "\t",
        " ",
        "  ",
        "\u2028",
    ),
    *(
        "{{ messages }}",
        "{% raw %}",
        "%s %d %%",
        "<b>&amp;</b>",
        "<think>",
        "</think>",
        "assistant",
        "### Response:",
        "\\n",
        '"',
        "0",
    ),
)


def _text(rng: random.Random) -> str:
    made = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))
    return made if made.strip() else made + "答"


def _turns(rng: random.Random) -> list[tuple[str, str]]:
    return [(_text(rng), _text(rng)) for _ in range(rng.randint(1, 4))]


def _alpaca(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    *history, (asked, answered) = _turns(rng)
    row: dict[str, Any] = {"instruction": asked, "output": answered, "history": [list(pair) for pair in history]}
    if rng.random() < 0.5:
        row["input"] = _text(rng)
    return row, [a for _, a in history] + [answered]


def _prompt_completion(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    ((asked, answered), *_) = _turns(rng)
    return {"prompt": asked, "completion": answered}, [answered]


def _prompt_messages(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    *history, (asked, answered) = _turns(rng)
    before = [m for q, a in history for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]
    row = {"prompt": [*before, {"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": answered}]}
    return row, [answered]


def _messages(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    turns = _turns(rng)
    for number, (asked, answered) in enumerate(turns, start=1):
        weight = 1 if number == len(turns) else rng.choice([0, 1])
        parts: Any = [{"type": "text", "text": c} for c in asked] if rng.random() < 0.3 else asked
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": answered, "weight": weight}]
        answers += [answered] * weight
    return {"messages": messages}, answers


def _sharegpt(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    turns = _turns(rng)
    said = [t for q, a in turns for t in ({"from": "human", "value": q}, {"from": "gpt", "value": a})]
    return {"conversations": said}, [a for _, a in turns]


FORMS: dict[str, tuple[Form, Callable[[random.Random], tuple[dict[str, Any], list[str]]]]] = {
    "alpaca": ("alpaca", _alpaca),
    "prompt_completion": ("prompt_completion", _prompt_completion),
    "prompt_messages": ("prompt_completion", _prompt_messages),
    "messages": ("messages", _messages),
    "sharegpt": ("sharegpt", _sharegpt),
}

TEMPLATES: dict[str, tuple[str, str | None, str, bool]] = {
    "chatml": ("chat", CHATML, "<|im_end|>", False),
    "tools": ("chat", TOOLS, "<|im_end|>", False),
    "spaced": ("chat", SPACED, "</s>", True),
    "dated": ("chat", DATED, "<|eot|>", False),
    "alpaca_en": ("alpaca_en", None, "</s>", False),
    "alpaca_zh": ("alpaca_zh", None, "</s>", False),
    "own": ("own", OWN, "</s>", False),
}
"""Name, source, stop token, and whether the template strips answers. `dated` strips only around its expression."""


def _template(tmp_path: Path, name: str, source: str | None, **policies: Any) -> Template:
    save(tmp_path, source if name == "chat" else None, bos_token="<|begin|>", eos_token="</s>")
    return load_template(name, source if name == "own" else None, tmp_path, **policies)


def _converted(form: Form, row: dict[str, Any]) -> Conversation:
    assert detect([Record("f:1", row)], {}) == form
    found = Converter(form, {}).convert(Record("f:1", row))
    assert isinstance(found, list), found
    return found[0]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", FORMS)
def test_supervised_text_is_the_answers_each_with_one_stop_token(form: str, template: str, tmp_path: Path) -> None:
    name, source, stop, _ = TEMPLATES[template]
    loaded = _template(tmp_path, name, source)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path) if name == "chat" else None
    rng = random.Random(f"{form} {template}")
    kind, make = FORMS[form]
    several = 0
    for _ in range(150):
        row, answers = make(rng)
        conversation = _converted(kind, row)
        (parts,) = loaded.rows(conversation)
        found = [part.removesuffix(stop) for part in parts[1::2]]
        strips = template in ("spaced", "dated")
        assert [f if not strips else f.strip() for f in found] == [a if not strips else a.strip() for a in answers]
        assert all(part.endswith(stop) and part.count(stop) == 1 for part in parts[1::2])
        assert len(parts) == 2 * len(answers)
        several += len(answers) > 1
        if tokenizer is not None and template not in ("spaced",):
            messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
            whole = tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024")
            assert whole.startswith("".join(parts))
            asked = tokenizer.apply_chat_template(
                messages[: [t.supervised for t in conversation.turns].index(True)],
                tokenize=False,
                add_generation_prompt=True,
                date_string="26 Jul 2024",
            )
            assert parts[0] == asked
    assert several or "prompt" in form


def test_frames_are_used_and_equal_the_full_rendering(tmp_path: Path) -> None:
    """A template that only prints contents is framed; one that looks into them is not."""
    for number, (name, source, framed) in enumerate(
        [("chat", CHATML, True), ("chat", TOOLS, True), ("alpaca_zh", None, True), ("own", OWN, True)]
        + [("chat", SPACED, False), ("chat", DATED, False), ("chat", THINKING, False), ("chat", FORGETS, True)]
        + [("chat", CHATML.replace("message['content']", c), False) for c in LOOKS]
    ):
        loaded = _template(tmp_path / str(number), name, source)
        conversation = Conversation("f:1", (Turn("user", "q"), Turn("assistant", "a", "", True)))
        assert len(loaded.rows(conversation)) == 1
        assert any(loaded.frames.values()) == framed, source
    conversation = _thinking(2)  # the same template looks into an answer once a question follows it
    plain = Conversation("f:1", tuple(Turn(t.role, t.content[-2:], "", t.supervised) for t in conversation.turns))
    forgets = _template(tmp_path / "forgets", "chat", FORGETS)
    assert len(forgets.rows(plain)) == 1
    assert list(forgets.frames.values()) == [None]


LOOKS = [
    "message['content'] | trim",
    "message['content'].strip()",
    "('' ~ message['content']) | trim",
    "(message['content'] + '') | trim",
    "('x' + message['content'])[1:]",
    "('%s' % message['content']).strip()",
    "'{}'.format(message['content'])",
    "message['content'].replace('\\t', ' ')",
    "(message['content'] | string).rstrip()",
    "(message['content'] if 'q' not in message['content'] else message['content'])",
    "(message['content'] if message['content'] != 'zz' else '')",
    "(message['content'] if message['content'] | length < 99999 else '')",
    "([message['content']] | join).strip()",
    "message['content'].split('zz') | join('zz')",
]


def test_a_row_that_a_frame_would_get_wrong_is_rendered_in_full(tmp_path: Path) -> None:
    """Were the proof wrong, the first rows of each shape still would tell."""
    loaded = _template(tmp_path, "chat", CHATML)
    conversation = Conversation("f:1", (Turn("user", "q"), Turn("assistant", "a", "", True)))
    right = loaded.rows(conversation)
    (shape,) = loaded.frames
    loaded.frames[shape] = type(loaded.frames[shape])((lambda _: "x", lambda _: "y"), frozenset())  # type: ignore[misc]
    assert loaded.rows(conversation) == right
    assert loaded.frames[shape] is None


TOOL = {"type": "function", "function": {"name": "look_up", "description": "查", "parameters": {"type": "object"}}}
CALLING = (
    Turn("user", "q"),
    Turn("assistant", "Let me see. ", "", True, (Call("", "look_up", {"what": "猫", "n": 3}), Call("", "look_up", {}))),
    Turn("tool", '{"found": ["é"]}'),
    Turn("assistant", "A cat.", "", True),
)


def test_calls_are_supervised_and_tools_are_printed(tmp_path: Path) -> None:
    loaded = _template(tmp_path, "chat", TOOLS)
    (parts,) = loaded.rows(Conversation("f:1", (Turn("system", "s"), *CALLING), (TOOL,)))
    call = '<tool_call>\n{"name": "look_up", "arguments": {"what": "猫", "n": 3}}\n</tool_call>'
    assert parts[1] == f'Let me see. {call}<tool_call>\n{{"name": "look_up", "arguments": {{}}}}\n</tool_call><|im_end|>'
    assert parts[3] == "A cat.<|im_end|>"
    assert json.dumps(TOOL, ensure_ascii=False) in parts[0]
    assert '<tool_response>\n{"found": ["é"]}\n</tool_response>' in parts[2]


@pytest.mark.parametrize(
    ("turns", "tools", "named"),
    [
        ((Turn("system", "s"), *CALLING[:1], CALLING[3]), (), "a system turn"),
        (CALLING[:1] + CALLING[3:], (TOOL,), "tools"),
        (CALLING, (), "calls"),
    ],
)
def test_what_a_template_would_leave_out_refuses_the_row(turns: Any, tools: Any, named: str, tmp_path: Path) -> None:
    silent = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
    loaded = _template(tmp_path, "chat", silent)
    with pytest.raises(DataError, match=f"leaves out {named}"):
        loaded.rows(Conversation("f:1", turns, tools))
    with pytest.raises(DataError, match="no place for"):
        _template(tmp_path, "alpaca_zh", None).rows(Conversation("f:1", turns, tools))


def _thinking(count: int) -> Conversation:
    turns: list[Turn] = []
    for n in range(count):
        turns += [Turn("user", f"q{n}"), Turn("assistant", f"<think>\nhm {n}\n</think>\n\na{n}", "", True)]
    return Conversation("f:1", tuple(turns))


def test_reasoning_that_the_template_forgets_is_split_or_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"changes the answer; set format\.reasoning to split"):
        _template(tmp_path / "a", "chat", FORGETS).rows(_thinking(2))
    split = _template(tmp_path / "b", "chat", FORGETS, reasoning="split")
    first, second = split.rows(_thinking(2))
    assert first == ("<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n", "<think>\nhm 0\n</think>\n\na0<|im_end|>")
    before = "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\na0<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
    assert second == (before + "<|im_start|>assistant\n", "<think>\nhm 1\n</think>\n\na1<|im_end|>")
    assert len(split.rows(_thinking(1))) == 1
    plain = Conversation("f:1", tuple(Turn(t.role, t.content[-2:], "", t.supervised) for t in _thinking(3).turns))
    assert len(split.rows(plain)) == 1


def test_a_prompt_that_opens_the_thought_leaves_the_rest_to_the_model(tmp_path: Path) -> None:
    opening = FORGETS.replace("'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}")
    probe = opening.replace(
        "{{- m.content }}",
        "{{- '<think>\\n' + m.content if m.role == 'assistant' and '<think>' not in m.content else m.content }}",
    )
    (parts,) = _template(tmp_path, "chat", probe).rows(_thinking(1))
    assert parts == ("<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n<think>\n", "hm 0\n</think>\n\na0<|im_end|>")


def test_supervise_policies(tmp_path: Path) -> None:
    conversation = Conversation("f:1", (Turn("user", "q"), Turn("assistant", "a", "", True)) * 2)
    rows = {
        policy: _template(tmp_path, "chat", CHATML, supervise=policy).rows(conversation)[0]
        for policy in ("every_turn", "last_turn", "all_text")
    }
    turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert rows["every_turn"] == (turn, "a<|im_end|>", "\n" + turn, "a<|im_end|>")
    assert rows["last_turn"] == (turn + "a<|im_end|>\n" + turn, "a<|im_end|>")
    assert rows["all_text"] == ("", "".join(rows["every_turn"]))
    unweighted = Conversation("f:1", (*conversation.turns[:3], Turn("assistant", "a")))
    assert _template(tmp_path, "chat", CHATML).rows(unweighted)[0] == rows["every_turn"][:2]
    with pytest.raises(DataError, match="weight 0"):
        _template(tmp_path, "chat", CHATML, supervise="last_turn").rows(unweighted)
