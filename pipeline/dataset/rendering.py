"""Conversations to text by a template.

Contract: `Renderer.text` is what the template writes for the first turns of a conversation, or DataError with the row's place and
the template's own words. A template gets `messages` (role, content; tool_calls of an assistant turn; name and tool_call_id of a
tool turn), `tools`, `add_generation_prompt` and the tokenizer's `bos_token`, `eos_token`, ... The named and own ones find in a
user turn also `instruction` and `input`, which `content` shows as one text. It runs in a sandbox and sees no clock: a template
that prints the date takes the fixed one of its own `else` branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateError

from pipeline.artifact import digest_text, read_json
from pipeline.config.errors import DataError, ModelError
from pipeline.dataset.conversation import Conversation, Turn
from pipeline.dataset.dialect import sandbox
from pipeline.dataset.frames import allows_frames

NAMED = "use 'alpaca_en' or 'alpaca_zh'"
"""The way out where a chat template is of no use."""


class Renderer:
    """A template and the special tokens of one tokenizer.

    digest: SHA-256 of the template's source. framed: what it writes around contents does not depend on them, or notes that it
    does. other: which other template to take.
    """

    def __init__(self, name: str, source: str, model: Path) -> None:
        self.name, self.digest = name, digest_text(source)
        self.other = NAMED if name == "chat" else "use 'chat', or leave these rows out"
        self._special = special_token_map(model)
        environment = sandbox()
        try:
            self.framed = allows_frames(environment.parse(source))
            self._compiled: Compiled = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"template '{name}': not valid Jinja: {_line(error)}; {self.other}") from error

    def text(
        self, conversation: Conversation, count: int, wrap: Callable[[str], str] = str, *, prompt: bool | None = None
    ) -> str:
        """The first `count` turns rendered, with the beginning of an answer if they do not end in one."""
        messages = [self._message(turn, wrap) for turn in conversation.turns[:count]]
        ask = prompt if prompt is not None else conversation.turns[count - 1].role != "assistant"
        try:
            return self._compiled.render(
                messages=messages,
                tools=list(conversation.tools) or None,
                documents=None,
                add_generation_prompt=ask,
                **self._special,
            )
        except Exception as error:  # an expression in a template raises what Python raises
            raise DataError(self.said(conversation, f"fails: {_line(error)}", self.other)) from error

    def _message(self, turn: Turn, wrap: Callable[[str], str]) -> dict[str, Any]:
        """A turn as templates know it; keys without a value are left out, which some templates would print as None."""
        message: dict[str, Any] = {"role": turn.role, "content": wrap(turn.text)}
        if turn.role == "user" and self.name != "chat":
            message |= {"instruction": wrap(turn.content), "input": wrap(turn.input) if turn.input else ""}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({"id": call.id} if call.id else {})
                for call in turn.calls
            ]
        if turn.name:
            message["name"] = turn.name
        if turn.call_id:
            message["tool_call_id"] = turn.call_id
        return message

    def said(self, conversation: Conversation, what: str, way_out: str) -> str:
        kind = "the chat template" if self.name == "chat" else f"template '{self.name}'"
        return f"{conversation.place}: {kind} {what}; {way_out}"


def special_tokens(model: Path) -> tuple[str, ...]:
    """Texts that the tokenizer in `model` reads as one control token each."""
    added = read_json(model / "tokenizer.json", "the base model's tokenizer")["added_tokens"]
    return tuple(sorted(token["content"] for token in added if token["special"]))


def special_token_map(model: Path) -> dict[str, str]:
    """The special tokens that a tokenizer names, as templates know them."""
    config: Mapping[str, Any] = read_json(model / "tokenizer_config.json", "the base model's tokenizer configuration")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    values = {name: config.get(name) for name in names}
    return {name: v["content"] if isinstance(v, dict) else v for name, v in values.items() if v}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
