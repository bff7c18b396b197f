"""Records to conversations: four forms of instruction data, detected from evidence or stated.

Contract: text unchanged, nothing dropped in silence. A row that does not fit its form is a Reject with a reason to count
by; keys that conversion does not look at are counted in `Converter.ignored`, those of a turn as `messages[].KEY`.
A key whose value is null counts as absent, since columnar files give every row the keys of all.

    alpaca             instruction, input or context, output; system; history [[question, answer], ...];
                       or instances [{input, output}, ...], each of which becomes a row of its own
    prompt_completion  prompt, completion: two texts, or two lists of messages of which only the second is trained on
    messages           messages [{role, content, tool_calls, weight}, ...] as of the OpenAI API; tools
    sharegpt           conversations [{from, value}, ...] with human, gpt, system, function_call, observation; system, tools
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, cast, get_args

from pipeline.dataset.conversation import Call, Conversation, Role, Turn, problem
from pipeline.dataset.record import Record, Reject

Form = Literal["alpaca", "prompt_completion", "messages", "sharegpt"]

FIELDS: Mapping[Form, tuple[str, ...]] = {
    "alpaca": ("instruction", "input", "context", "output", "system", "history", "instances"),
    "prompt_completion": ("prompt", "completion", "tools", "role", "content", "weight"),
    "messages": ("messages", "tools", "role", "content", "weight"),
    "sharegpt": ("conversations", "system", "tools", "from", "value"),
}
"""Names that a column mapping may give a column to; role, content, weight, from and value are keys of a turn."""

EVIDENCE_ROWS = 64
"""Rows at the head of a file that are looked at for its form."""

_TURN_FIELDS = ("role", "content", "weight", "from", "value")
_MESSAGE_FIELDS = ("role", "content", "weight", "tool_calls", "function_call", "tool_call_id", "name", "reasoning_content")
_ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
_SHAREGPT_ROLES: Mapping[str, Role | Literal["call"]] = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "function_call": "call",
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Refused(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


def detect(rows: Iterable[Record], columns: Mapping[str, str]) -> Form | None:
    """The form that most of some rows show by their keys; None where no row shows any."""
    votes = Counter(form for row in rows if (form := _evidence(_renamed(row.value, columns))))
    return max(get_args(Form), key=lambda form: votes[form]) if votes else None


def _evidence(row: Mapping[str, Any]) -> Form | None:
    """The form of one row; a list of turns says more than single columns, which sets often carry beside it."""
    if _holds_turns(row.get("messages")):
        return "messages"
    if _holds_turns(row.get("conversations")):
        return "sharegpt"
    if "instruction" in row and ("output" in row or "instances" in row):
        return "alpaca"
    return "prompt_completion" if "prompt" in row and "completion" in row else None


class Converter:
    """Records of one form to conversations. `columns`: our name of a field -> its name in the file.

    ignored: how many rows, or turns, carried each key that is not looked at."""

    def __init__(self, form: Form, columns: Mapping[str, str]) -> None:
        self.form, self.columns = form, columns
        self._of_form = {
            "alpaca": self._alpaca,
            "prompt_completion": self._prompt_completion,
            "messages": self._messages,
            "sharegpt": self._sharegpt,
        }[form]
        self._known = frozenset(FIELDS[form]) - frozenset(_TURN_FIELDS)
        self._keys = {name: columns.get(name, name) for name in _TURN_FIELDS}
        self._shapes = Counter[tuple[str, ...]]()
        self._turn_shapes = Counter[tuple[str, ...]]()

    @property
    def ignored(self) -> Counter[str]:
        """Keys that conversion does not look at, half a surrogate pair in one as `?`."""
        found = Counter[str]()
        turn_keys = {self._keys.get(name, name) for name in (("from", "value") if self.form == "sharegpt" else _MESSAGE_FIELDS)}
        where = {"messages": "messages[].", "sharegpt": "conversations[].", "prompt_completion": "prompt[]."}
        for shapes, known, prefix in (
            (self._shapes, self._known, ""),
            (self._turn_shapes, turn_keys, where.get(self.form, "instances[].")),
        ):
            for shape, count in shapes.items():
                for key in shape:
                    if key not in known:
                        found[prefix + key.encode("utf-8", "replace").decode()] += count
        return found

    def convert(self, record: Record) -> list[Conversation] | Reject:
        """The conversations of a row, most often one."""
        row = _renamed(record.value, self.columns) if self.columns else record.value
        self._shapes[tuple(row)] += 1
        try:
            found = self._of_form(row, record.place)
            for conversation in found:
                breach = problem(conversation.turns)
                if breach:
                    return Reject(conversation.place, *breach)
                if not any(turn.supervised for turn in conversation.turns):
                    return Reject(conversation.place, "nothing_supervised", "every answer has weight 0")
        except _Refused as refused:
            return Reject(record.place, refused.reason, refused.detail)
        return found

    def _alpaca(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        get = row.get
        instruction, extra, output = get("instruction"), get("input"), get("output")
        instances = get("instances")
        if instances is not None:
            return self._instances(row, place)
        if not (type(instruction) is str and type(output) is str and (extra is None or type(extra) is str)):
            for field, value in (("instruction", instruction), ("output", output)):
                if value is None:
                    raise _Refused("missing_field", f"'{field}' is missing")
            for field, value in (("instruction", instruction), ("output", output), ("input", extra)):
                if value is not None:
                    _text(value, field)
        context = get("context")
        if context is not None:
            if extra and _text(context, "context"):
                raise _Refused(
                    "unsupported_field", "'input' and 'context' both have content; which of the two is meant is not clear"
                )
            extra = extra or _text(context, "context")
        turns = self._before(row)
        turns.append(Turn("user", cast("str", instruction), extra or ""))
        turns.append(Turn("assistant", cast("str", output), "", True))
        return [Conversation(place, tuple(turns))]

    def _before(self, row: Mapping[str, Any]) -> list[Turn]:
        """System turn and earlier turns of an alpaca row."""
        turns: list[Turn] = []
        if row.get("system"):
            turns.append(Turn("system", _text(row["system"], "system")))
        history = row.get("history")
        if history:
            for number, pair in enumerate(_list(history, "history"), start=1):
                if not (isinstance(pair, list) and len(cast("list[Any]", pair)) == 2):
                    raise _Refused("not_a_list", f"history {number} is no pair of question and answer")
                asked, answered = cast("list[Any]", pair)
                turns.append(Turn("user", _text(asked, f"history {number} question")))
                turns.append(Turn("assistant", _text(answered, f"history {number} answer"), "", True))
        return turns

    def _instances(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        for field in ("input", "context", "output"):
            if row.get(field):
                raise _Refused(
                    "unsupported_field", f"'{field}' stands beside 'instances'; which of the two is meant is not clear"
                )
        instances = _list(row["instances"], "instances")
        if not instances:
            raise _Refused("no_turns", "'instances' is empty")
        found: list[Conversation] = []
        for number, instance in enumerate(instances, start=1):
            values = _object(instance, f"instance {number}")
            self._note_turn(values, ("input", "output"))
            one = {"instruction": row.get("instruction"), "input": values.get("input"), "output": values.get("output")}
            one |= {"system": row.get("system"), "history": row.get("history")}
            found += self._alpaca(one, place if len(instances) == 1 else f"{place}#{number}")
        return found

    def _prompt_completion(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        prompt, completion = row.get("prompt"), row.get("completion")
        for field, value in (("prompt", prompt), ("completion", completion)):
            if value is None:
                raise _Refused("missing_field", f"'{field}' is missing")
        tools = _tools(row.get("tools"))
        if isinstance(prompt, str) and isinstance(completion, str):
            return [Conversation(place, (Turn("user", prompt), Turn("assistant", completion, "", True)), tools)]
        if isinstance(prompt, list) != isinstance(completion, list):
            raise _Refused("not_text", "'prompt' and 'completion' are neither two texts nor two lists of messages")
        if not isinstance(prompt, list):
            _text(prompt, "prompt")
            _text(completion, "completion")
        asked = self._turns(prompt, "prompt", trained=False)
        answered = self._turns(completion, "completion", trained=True)
        return [Conversation(place, (*asked, *answered), tools)]

    def _messages(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        if row.get("messages") is None:
            raise _Refused("missing_field", "'messages' is missing")
        return [Conversation(place, tuple(self._turns(row["messages"], "messages", trained=True)), _tools(row.get("tools")))]

    def _turns(self, value: Any, field: str, *, trained: bool) -> list[Turn]:
        return [
            self._turn(_object(m, f"{field} {n}"), f"{field} {n}", trained)
            for n, m in enumerate(_turn_list(value, field), start=1)
        ]

    def _turn(self, message: Mapping[str, Any], where: str, trained: bool) -> Turn:
        keys = self._keys
        self._note_turn(message, ())
        role = self._role(message.get(keys["role"]), where, _ROLES)
        content = _content(message.get(keys["content"]), where)
        if role == "assistant":
            calls = _calls(message, where)
            if content is None and not calls:
                raise _Refused("missing_field", f"{where}: '{keys['content']}' is missing")
            reasoning = message.get("reasoning_content")
            if reasoning is not None and _text(reasoning, f"{where}: reasoning_content"):
                content = f"<think>\n{reasoning}\n</think>\n\n{content or ''}"
            return Turn(role, content or "", "", trained and _weight(message.get(keys["weight"]), where), calls)
        for field in ("tool_calls", "function_call"):
            if message.get(field):
                raise _Refused("bad_tool_call", f"{where}: a turn of the {role} calls a tool")
        if content is None:
            raise _Refused("missing_field", f"{where}: '{keys['content']}' is missing")
        if _weight(message.get(keys["weight"]), where) and role != "assistant" and message.get(keys["weight"]) is not None:
            raise _Refused("bad_weight", f"{where}: a turn of the {role} has a weight, and only answers are trained on")
        if role != "tool":
            return Turn(role, content)
        named = (message.get(field) for field in ("name", "tool_call_id"))
        name, call_id = ("" if v is None else _text(v, f"{where}: name or tool_call_id") for v in named)
        return Turn(role, content, name=name, call_id=call_id)

    def _sharegpt(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        if row.get("conversations") is None:
            raise _Refused("missing_field", "'conversations' is missing")
        keys, turns = self._keys, list[Turn]()
        if row.get("system"):
            turns.append(Turn("system", _text(row["system"], "system")))
        for number, value in enumerate(_turn_list(row["conversations"], "conversations"), start=1):
            where = f"conversations {number}"
            message = _object(value, where)
            self._note_turn(message, ())
            if "role" in message and "content" in message and keys["from"] not in message:  # a messages row under this name
                turns.append(self._turn(message, where, True))
                continue
            role = self._role(message.get(keys["from"]), where, _SHAREGPT_ROLES)
            if message.get(keys["value"]) is None:
                raise _Refused("missing_field", f"{where}: '{keys['value']}' is missing")
            text = _text(message[keys["value"]], where)
            if role == "call":
                turns.append(Turn("assistant", "", "", True, _json_calls(text, where)))
            else:
                turns.append(Turn(role, text, "", role == "assistant"))
        return [Conversation(place, tuple(turns), _tools(row.get("tools")))]

    def _role(self, value: Any, where: str, known: Mapping[str, Any]) -> Any:
        if value is None:
            raise _Refused("missing_field", f"{where}: no role")
        role = known.get(value) if isinstance(value, str) else None
        if role is None:
            raise _Refused("unknown_role", f"{where}: role {_short(value)} is none of {', '.join(known)}")
        return role

    def _note_turn(self, message: Mapping[str, Any], known: tuple[str, ...]) -> None:
        self._turn_shapes[tuple(k for k in message if k not in known)] += 1


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row under our names. A column that is taken no longer stands under its own name; one that stood under ours is
    hidden, and counted as ignored under `NAME (of the file)`."""
    mine = {ours: theirs for ours, theirs in columns.items() if ours not in _TURN_FIELDS}
    if not mine:
        return row
    taken = set(mine.values())
    kept = {(f"{k} (of the file)" if k in mine else k): v for k, v in row.items() if k not in taken}
    return {**kept, **{ours: row[theirs] for ours, theirs in mine.items() if theirs in row}}


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _Refused("not_text", f"'{field}' is {type(value).__name__}, not text")
    return value


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Refused("not_a_list", f"'{field}' is {type(value).__name__}, not a list")
    return cast("list[Any]", value)


def _holds_turns(value: Any) -> bool:
    """A list, or its JSON text, which is all that a CSV file can hold."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _turn_list(value: Any, field: str) -> list[Any]:
    if isinstance(value, str) and _holds_turns(value):
        value = _parsed(value, "not_a_list", field)
    return _list(value, field)


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Refused("not_an_object", f"{field} is {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def _content(value: Any, where: str) -> str | None:
    """Text of a message: a string, or content parts of type text joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _Refused("not_text", f"{where}: the content is {type(value).__name__}, not text")
    texts: list[str] = []
    for part in cast("list[Any]", value):
        kind = _object(part, f"{where}: a content part").get("type")
        if kind != "text":
            raise _Refused("not_text", f"{where}: a content part of type {_short(kind)}; only text can be trained on")
        texts.append(_text(part.get("text"), f"{where}: text of a content part"))
    return "".join(texts)


def _weight(value: Any, where: str) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or value not in (0, 1):
        raise _Refused("bad_weight", f"{where}: weight {_short(value)} is neither 0 nor 1")
    return value == 1


def _calls(message: Mapping[str, Any], where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if not calls and not legacy:
        return ()
    if calls and legacy:
        raise _Refused("bad_tool_call", f"{where}: both tool_calls and function_call")
    if legacy:
        return (_call(legacy, where, ""),)
    if not isinstance(calls, list):
        raise _Refused("bad_tool_call", f"{where}: tool_calls is {type(calls).__name__}, not a list")
    found: list[Call] = []
    for value in cast("list[Any]", calls):
        if not isinstance(value, dict):
            raise _Refused("bad_tool_call", f"{where}: a call is {type(value).__name__}, not an object")
        call = cast("dict[str, Any]", value)
        name = call.get("id")
        found.append(_call(call.get("function", call), where, name if isinstance(name, str) else ""))
    return tuple(found)


def _json_calls(text: str, where: str) -> tuple[Call, ...]:
    """The call, or the list of calls, that a ShareGPT turn spells in JSON."""
    value = _parsed(text, "bad_tool_call", where)
    calls = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not calls:
        raise _Refused("bad_tool_call", f"{where}: an empty list of calls")
    return tuple(_call(call, where, "") for call in calls)


def _call(value: Any, where: str, identity: str) -> Call:
    call = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    name: Any = call.get("name")
    arguments: Any = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "bad_tool_call", f"{where}: arguments") if arguments.strip() else {}
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise _Refused("bad_tool_call", f"{where}: a call needs a name and arguments that are a JSON object")
    return Call(identity, name, cast("dict[str, Any]", arguments))


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _parsed(value, "bad_tools", "tools") if value.strip() else None
    if not value:
        return ()
    if not isinstance(value, list):
        raise _Refused("bad_tools", f"tools are {type(value).__name__}, not a list")
    found: list[Mapping[str, Any]] = []
    for number, tool in enumerate(cast("list[Any]", value), start=1):
        wrapped = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
        inner: Any = wrapped.get("function", wrapped)
        if not (isinstance(inner, dict) and isinstance(cast("dict[str, Any]", inner).get("name"), str)):
            raise _Refused("bad_tools", f"tool {number} has no name")
        found.append(wrapped if "function" in wrapped else {"type": "function", "function": wrapped})
    return tuple(found)


def _parsed(text: str, reason: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _Refused(reason, f"{where}: not JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that stands twice would lose one of its values."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
