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

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

from pipeline.dataset.conversation import Conversation, Role, Turn, problem
from pipeline.dataset.fields import (
    Refused,
    calls_of,
    content_of,
    holds_turns,
    json_calls,
    list_of,
    object_of,
    short,
    text_of,
    tools_of,
    turns_of,
    weight_of,
)
from pipeline.dataset.reading.record import Record, Reject

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


def detect(rows: Iterable[Record], columns: Mapping[str, str]) -> Form | None:
    """The form that most of some rows show by their keys; None where no row shows any."""
    votes = Counter(form for row in rows if (form := _evidence(_renamed(row.value, columns))))
    return max(get_args(Form), key=lambda form: votes[form]) if votes else None


def _evidence(row: Mapping[str, Any]) -> Form | None:
    """The form of one row; a list of turns says more than single columns, which sets often carry beside it."""
    if holds_turns(row.get("messages")):
        return "messages"
    if holds_turns(row.get("conversations")):
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
        except Refused as refused:
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
                    raise Refused("missing_field", f"'{field}' is missing")
            for field, value in (("instruction", instruction), ("output", output), ("input", extra)):
                if value is not None:
                    text_of(value, field)
        context = get("context")
        if context is not None:
            if extra and text_of(context, "context"):
                raise Refused(
                    "unsupported_field", "'input' and 'context' both have content; which of the two is meant is not clear"
                )
            extra = extra or text_of(context, "context")
        turns = self._before(row)
        turns.append(Turn("user", cast("str", instruction), extra or ""))
        turns.append(Turn("assistant", cast("str", output), "", True))
        return [Conversation(place, tuple(turns))]

    def _before(self, row: Mapping[str, Any]) -> list[Turn]:
        """System turn and earlier turns of an alpaca row."""
        turns: list[Turn] = []
        if row.get("system"):
            turns.append(Turn("system", text_of(row["system"], "system")))
        history = row.get("history")
        if history:
            for number, pair in enumerate(list_of(history, "history"), start=1):
                if not (isinstance(pair, list) and len(cast("list[Any]", pair)) == 2):
                    raise Refused("not_a_list", f"history {number} is no pair of question and answer")
                asked, answered = cast("list[Any]", pair)
                turns.append(Turn("user", text_of(asked, f"history {number} question")))
                turns.append(Turn("assistant", text_of(answered, f"history {number} answer"), "", True))
        return turns

    def _instances(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        for field in ("input", "context", "output"):
            if row.get(field):
                raise Refused("unsupported_field", f"'{field}' stands beside 'instances'; which of the two is meant is not clear")
        instances = list_of(row["instances"], "instances")
        if not instances:
            raise Refused("no_turns", "'instances' is empty")
        found: list[Conversation] = []
        for number, instance in enumerate(instances, start=1):
            values = object_of(instance, f"instance {number}")
            self._note_turn(values, ("input", "output"))
            one = {"instruction": row.get("instruction"), "input": values.get("input"), "output": values.get("output")}
            one |= {"system": row.get("system"), "history": row.get("history")}
            found += self._alpaca(one, place if len(instances) == 1 else f"{place}#{number}")
        return found

    def _prompt_completion(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        prompt, completion = row.get("prompt"), row.get("completion")
        for field, value in (("prompt", prompt), ("completion", completion)):
            if value is None:
                raise Refused("missing_field", f"'{field}' is missing")
        tools = tools_of(row.get("tools"))
        if isinstance(prompt, str) and isinstance(completion, str):
            return [Conversation(place, (Turn("user", prompt), Turn("assistant", completion, "", True)), tools)]
        if isinstance(prompt, list) != isinstance(completion, list):
            raise Refused("not_text", "'prompt' and 'completion' are neither two texts nor two lists of messages")
        if not isinstance(prompt, list):
            text_of(prompt, "prompt")
            text_of(completion, "completion")
        asked = self._turns(prompt, "prompt", trained=False)
        answered = self._turns(completion, "completion", trained=True)
        return [Conversation(place, (*asked, *answered), tools)]

    def _messages(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        if row.get("messages") is None:
            raise Refused("missing_field", "'messages' is missing")
        return [Conversation(place, tuple(self._turns(row["messages"], "messages", trained=True)), tools_of(row.get("tools")))]

    def _turns(self, value: Any, field: str, *, trained: bool) -> list[Turn]:
        return [
            self._turn(object_of(m, f"{field} {n}"), f"{field} {n}", trained)
            for n, m in enumerate(turns_of(value, field), start=1)
        ]

    def _turn(self, message: Mapping[str, Any], where: str, trained: bool) -> Turn:
        keys = self._keys
        self._note_turn(message, ())
        role = self._role(message.get(keys["role"]), where, _ROLES)
        content = content_of(message.get(keys["content"]), where)
        if role == "assistant":
            calls = calls_of(message, where)
            if content is None and not calls:
                raise Refused("missing_field", f"{where}: '{keys['content']}' is missing")
            reasoning = message.get("reasoning_content")
            if reasoning is not None and text_of(reasoning, f"{where}: reasoning_content"):
                content = f"<think>\n{reasoning}\n</think>\n\n{content or ''}"
            return Turn(role, content or "", "", trained and weight_of(message.get(keys["weight"]), where), calls)
        for field in ("tool_calls", "function_call"):
            if message.get(field):
                raise Refused("bad_tool_call", f"{where}: a turn of the {role} calls a tool")
        if content is None:
            raise Refused("missing_field", f"{where}: '{keys['content']}' is missing")
        if weight_of(message.get(keys["weight"]), where) and role != "assistant" and message.get(keys["weight"]) is not None:
            raise Refused("bad_weight", f"{where}: a turn of the {role} has a weight, and only answers are trained on")
        if role != "tool":
            return Turn(role, content)
        named = (message.get(field) for field in ("name", "tool_call_id"))
        name, call_id = ("" if v is None else text_of(v, f"{where}: name or tool_call_id") for v in named)
        return Turn(role, content, name=name, call_id=call_id)

    def _sharegpt(self, row: Mapping[str, Any], place: str) -> list[Conversation]:
        if row.get("conversations") is None:
            raise Refused("missing_field", "'conversations' is missing")
        keys, turns = self._keys, list[Turn]()
        if row.get("system"):
            turns.append(Turn("system", text_of(row["system"], "system")))
        for number, value in enumerate(turns_of(row["conversations"], "conversations"), start=1):
            where = f"conversations {number}"
            message = object_of(value, where)
            self._note_turn(message, ())
            if "role" in message and "content" in message and keys["from"] not in message:  # a messages row under this name
                turns.append(self._turn(message, where, True))
                continue
            role = self._role(message.get(keys["from"]), where, _SHAREGPT_ROLES)
            if message.get(keys["value"]) is None:
                raise Refused("missing_field", f"{where}: '{keys['value']}' is missing")
            text = text_of(message[keys["value"]], where)
            if role == "call":
                turns.append(Turn("assistant", "", "", True, json_calls(text, where)))
            else:
                turns.append(Turn(role, text, "", role == "assistant"))
        return [Conversation(place, tuple(turns), tools_of(row.get("tools")))]

    def _role(self, value: Any, where: str, known: Mapping[str, Any]) -> Any:
        if value is None:
            raise Refused("missing_field", f"{where}: no role")
        role = known.get(value) if isinstance(value, str) else None
        if role is None:
            raise Refused("unknown_role", f"{where}: role {short(value)} is none of {', '.join(known)}")
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
