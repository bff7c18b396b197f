"""Values of a raw row to texts, lists, tool calls and tools, each checked.

Contract: a value of another kind than the form asks for is Refused with the reason to count it by; no value is changed or
guessed. `where` and `field` say in the sentence which value it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from pipeline.dataset.conversation import Call


class Refused(Exception):
    """A row that does not fit its form: the reason as in `Reject`."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


def text_of(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Refused("not_text", f"'{field}' is {type(value).__name__}, not text")
    return value


def list_of(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("not_a_list", f"'{field}' is {type(value).__name__}, not a list")
    return cast("list[Any]", value)


def holds_turns(value: Any) -> bool:
    """A list, or its JSON text, which is all that a CSV file can hold."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def turns_of(value: Any, field: str) -> list[Any]:
    if isinstance(value, str) and holds_turns(value):
        value = _parsed(value, "not_a_list", field)
    return list_of(value, field)


def object_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Refused("not_an_object", f"{field} is {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def content_of(value: Any, where: str) -> str | None:
    """Text of a message: a string, or content parts of type text joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Refused("not_text", f"{where}: the content is {type(value).__name__}, not text")
    texts: list[str] = []
    for part in cast("list[Any]", value):
        kind = object_of(part, f"{where}: a content part").get("type")
        if kind != "text":
            raise Refused("not_text", f"{where}: a content part of type {short(kind)}; only text can be trained on")
        texts.append(text_of(part.get("text"), f"{where}: text of a content part"))
    return "".join(texts)


def weight_of(value: Any, where: str) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or value not in (0, 1):
        raise Refused("bad_weight", f"{where}: weight {short(value)} is neither 0 nor 1")
    return value == 1


def calls_of(message: Mapping[str, Any], where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if not calls and not legacy:
        return ()
    if calls and legacy:
        raise Refused("bad_tool_call", f"{where}: both tool_calls and function_call")
    if legacy:
        return (_call(legacy, where, ""),)
    if not isinstance(calls, list):
        raise Refused("bad_tool_call", f"{where}: tool_calls is {type(calls).__name__}, not a list")
    found: list[Call] = []
    for value in cast("list[Any]", calls):
        if not isinstance(value, dict):
            raise Refused("bad_tool_call", f"{where}: a call is {type(value).__name__}, not an object")
        call = cast("dict[str, Any]", value)
        name = call.get("id")
        found.append(_call(call.get("function", call), where, name if isinstance(name, str) else ""))
    return tuple(found)


def json_calls(text: str, where: str) -> tuple[Call, ...]:
    """The call, or the list of calls, that a ShareGPT turn spells in JSON."""
    value = _parsed(text, "bad_tool_call", where)
    calls = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not calls:
        raise Refused("bad_tool_call", f"{where}: an empty list of calls")
    return tuple(_call(call, where, "") for call in calls)


def _call(value: Any, where: str, identity: str) -> Call:
    call = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    name: Any = call.get("name")
    arguments: Any = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "bad_tool_call", f"{where}: arguments") if arguments.strip() else {}
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise Refused("bad_tool_call", f"{where}: a call needs a name and arguments that are a JSON object")
    return Call(identity, name, cast("dict[str, Any]", arguments))


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _parsed(value, "bad_tools", "tools") if value.strip() else None
    if not value:
        return ()
    if not isinstance(value, list):
        raise Refused("bad_tools", f"tools are {type(value).__name__}, not a list")
    found: list[Mapping[str, Any]] = []
    for number, tool in enumerate(cast("list[Any]", value), start=1):
        wrapped = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
        inner: Any = wrapped.get("function", wrapped)
        if not (isinstance(inner, dict) and isinstance(cast("dict[str, Any]", inner).get("name"), str)):
            raise Refused("bad_tools", f"tool {number} has no name")
        found.append(wrapped if "function" in wrapped else {"type": "function", "function": wrapped})
    return tuple(found)


def _parsed(text: str, reason: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused(reason, f"{where}: not JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that stands twice would lose one of its values."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
