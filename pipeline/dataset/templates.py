"""Examples to text parts under an instruction template.

Contract: a rendered example is a tuple of parts, context and supervised in turn, beginning with
context: `(prompt, answer + stop token)`. Joined, the parts are the text the model reads; the prompt is
exactly what is given to it when it answers. Each answer is followed by one stop token, which is
read off the template, and nothing follows the last. Templates run in a sandbox and see no clock:
a template that prints the date takes the fixed one of its own `else` branch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.artifact import digest_text, read_json
from pipeline.config.errors import DataError, ModelError
from pipeline.dataset.convert import Example

_NAMED = Path(__file__).parent / "templates"
_PROBE = Example("probe", "a question", "", "an answer")


@dataclass(frozen=True)
class Template:
    """A template ready for use.

    stop_token: text of the token that ends an answer. digest: SHA-256 of the template's source.
    render: example -> parts.
    """

    name: str
    stop_token: str
    digest: str
    render: Callable[[Example], tuple[str, ...]]


def load_template(name: str, model: Path) -> Template:
    """The template `name` for the tokenizer in `model`; ModelError where the two do not fit."""
    special = _special_token_map(model)
    return _chat(model, special) if name == "chat" else _instruction(name, special)


def special_tokens(model: Path) -> tuple[str, ...]:
    """Texts that the tokenizer in `model` reads as one control token each."""
    added = read_json(model / "tokenizer.json", "the base model's tokenizer")["added_tokens"]
    return tuple(sorted(token["content"] for token in added if token["special"]))


def _instruction(name: str, special: dict[str, str]) -> Template:
    source = (_NAMED / f"{name}.jinja").read_text(encoding="utf-8")
    compiled = _environment().from_string(source)
    if "eos_token" not in special:
        raise ModelError(f"template '{name}': the base model's tokenizer names no eos token, which ends an answer; use 'chat'")
    stop = special["eos_token"]

    def render(example: Example) -> tuple[str, ...]:
        return compiled.render(instruction=example.instruction, input=example.input), example.output + stop

    return Template(name, stop, digest_text(source), render)


def _chat(model: Path, special: dict[str, str]) -> Template:
    path = model / "chat_template.jinja"
    if not path.is_file():
        raise ModelError("template 'chat': the base model has no chat template; use 'alpaca_en' or 'alpaca_zh', or another base")
    source = path.read_text(encoding="utf-8")
    try:
        compiled = _environment().from_string(source)
    except TemplateError as error:
        raise ModelError(f"template 'chat': not valid Jinja: {_line(error)}; use 'alpaca_en' or 'alpaca_zh'") from error

    def text_of(messages: list[dict[str, str]], *, prompt: bool) -> str:
        return compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **special)

    def turns(example: Example) -> tuple[str, str]:
        """The prompt, and what the template writes after it once the answer is known."""
        question = example.instruction + ("\n" + example.input if example.input else "")
        messages = [{"role": "user", "content": question}]
        try:
            prompt = text_of(messages, prompt=True)
            whole = text_of([*messages, {"role": "assistant", "content": example.output}], prompt=False)
        except Exception as error:  # an expression in a template raises what Python raises
            raise DataError(
                f"{example.place}: the chat template fails: {_line(error)}; use 'alpaca_en' or 'alpaca_zh'"
            ) from error
        if not whole.startswith(prompt):
            raise DataError(
                f"{example.place}: the chat template writes another prompt with an answer than without, so what is "
                "supervised is not clear; use 'alpaca_en' or 'alpaca_zh'"
            )
        return prompt, whole[len(prompt) :]

    def changed(example: Example) -> DataError:
        return DataError(f"{example.place}: the chat template changes the answer; use 'alpaca_en' or 'alpaca_zh'")

    _, found, closing = turns(_PROBE)[1].rpartition(_PROBE.output)
    if not found:
        raise changed(_PROBE)
    stop = _stop_token(closing, special_tokens(model))

    def render(example: Example) -> tuple[str, ...]:
        prompt, tail = turns(example)
        # Found from the end: what a template writes before it (`<think>`) may spell a short answer too. Some templates strip.
        for answer in (example.output, example.output.strip()):
            if tail.endswith(answer + closing):
                return prompt + tail.removesuffix(answer + closing), answer + stop
        raise changed(example)

    return Template("chat", stop, digest_text(source), render)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stop_token(after: str, candidates: tuple[str, ...]) -> str:
    """The special token with which a template ends an answer."""
    found = [token for token in candidates if after.lstrip().startswith(token)]
    if not found:
        raise ModelError(
            f"template 'chat': an answer is followed by {after[:20]!r}, which begins with no special token, so the model "
            "could not learn to stop; use 'alpaca_en' or 'alpaca_zh'"
        )
    return max(found, key=len)


def _special_token_map(model: Path) -> dict[str, str]:
    config = read_json(model / "tokenizer_config.json", "the base model's tokenizer configuration")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    values = {name: config.get(name) for name in names}
    return {name: v["content"] if isinstance(v, dict) else v for name, v in values.items() if v}


class _Generation(Extension):
    """`{% generation %}`: a marker some templates carry around answers; here it only renders its body."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride] - a class variable there too

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect of Hugging Face chat templates: trimmed blocks, loop controls, `raise_exception`, UTF-8 `tojson`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.globals["raise_exception"] = raise_exception  # pyright: ignore[reportUnknownMemberType] - a bare dict in jinja2
    environment.filters["tojson"] = tojson  # pyright: ignore[reportUnknownMemberType] - a bare dict in jinja2
    return environment
