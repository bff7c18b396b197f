"""What a row says: turns of a conversation, and the tools that it may call.

Contract: a Conversation is in order (an optional system turn, then user turns that are answered, tool results after the
call that asked for them, the last word is the assistant's) and no question or answer in it is blank; `problem` names the
first breach. Text is the source's to the byte. Which answers are trained on is part of it (`supervised`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool by the assistant; `arguments` is the parsed JSON object, `id` empty where the source gives none."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `input`: material that an alpaca question is about, kept apart for templates with a place of its own.
    `name`, `call_id`: of a tool turn, whose result it is; empty where the source gives none."""

    role: Role
    content: str
    input: str = ""
    supervised: bool = False
    calls: tuple[Call, ...] = ()
    name: str = ""
    call_id: str = ""

    @property
    def text(self) -> str:
        """Content and input as one text, which is how a chat shows them."""
        return f"{self.content}\n{self.input}" if self.input else self.content


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one row, and the tools offered, each in the OpenAI form `{"type": "function", "function": {...}}`."""

    place: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def texts(self) -> Iterator[str]:
        """Every text in it that a template may print, those inside calls and tools included."""
        for turn in self.turns:
            yield turn.content
            if turn.input:
                yield turn.input
            if turn.name or turn.call_id:
                yield turn.name
                yield turn.call_id
            for call in turn.calls:
                yield call.id
                yield call.name
                yield from _strings(call.arguments)
        if self.tools:
            yield from _strings(self.tools)

    def mapped(self, change: Callable[[str], str]) -> Conversation:
        """The same with every text changed."""
        turns = tuple(
            replace(
                turn,
                content=change(turn.content),
                input=change(turn.input),
                name=change(turn.name),
                call_id=change(turn.call_id),
                calls=tuple(Call(change(c.id), change(c.name), _mapped(c.arguments, change)) for c in turn.calls),
            )
            for turn in self.turns
        )
        return Conversation(self.place, turns, tuple(_mapped(tool, change) for tool in self.tools))


_MAY_FOLLOW: dict[Role, tuple[Role, ...]] = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def problem(turns: Sequence[Turn]) -> tuple[str, str] | None:
    """Reason and detail of the first breach of the order of roles, or of the first blank turn; None for a sound one."""
    before: Turn | None = None
    for number, turn in enumerate(turns, start=1):
        role = turn.role
        if before is None:
            if role not in ("system", "user"):
                return "role_order", f"turn 1 is the {role}'s; a conversation begins with a system or a user turn"
        elif role not in _MAY_FOLLOW[before.role]:
            return "role_order", f"turn {number} ({role}) follows a turn of the {before.role}"
        elif role == "tool" and before.role == "assistant" and not before.calls:
            return "role_order", f"turn {number} is a tool's result, but nothing was called"
        elif role == "user" and before.calls:
            return "role_order", f"turn {number} ({role}) follows a call that no tool answered"
        if not turn.content.strip():
            if role == "user" and not turn.input.strip():
                return "empty_question", f"turn {number} ({role}) is empty"
            if role == "assistant" and not turn.calls:
                return "empty_answer", f"turn {number} ({role}) is empty"
            if role == "system":
                return "empty_turn", f"turn {number} ({role}) is empty"
        before = turn
    if before is None:
        return "no_turns", "there are no turns"
    if before.role != "assistant":
        return "unanswered", f"the last turn is the {before.role}'s, so nothing answers it"
    return None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("Sequence[Any]", value):
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(inner, change) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in cast("list[Any]", value)]
    return value
