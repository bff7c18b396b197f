"""Rows of four forms to conversations.

Would catch: text that is trimmed or changed, turns dropped without a word, a form guessed wrongly, keys that are ignored and
not counted, a bad row that raises or passes.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from pipeline.config.params import Column
from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.convert import FIELDS, Converter, Form, detect
from pipeline.dataset.reading.record import Record, Reject

pytestmark = pytest.mark.unit


def _convert(form: Form, row: Any, columns: dict[str, str] | None = None) -> list[Conversation] | Reject:
    return Converter(form, columns or {}).convert(Record("f:1", row))


def _one(form: Form, row: Any, columns: dict[str, str] | None = None) -> Conversation:
    found = _convert(form, row, columns)
    assert isinstance(found, list), found
    (conversation,) = found
    return conversation


def user(text: str, context: str = "") -> Turn:
    return Turn("user", text, context)


def answer(text: str, *calls: Call, supervised: bool = True) -> Turn:
    return Turn("assistant", text, "", supervised, calls)


def said(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def from_(role: Any, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"instruction": "q", "input": "i", "output": "a"}, ("q", "i", "a")),
        ({"instruction": "q", "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "input": None, "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "input": "", "output": "a"}, ("q", "", "a")),
        ({"instruction": "q", "context": "c", "output": "a"}, ("q", "c", "a")),
        ({"instruction": "q", "context": "c", "input": "", "output": "a"}, ("q", "c", "a")),
        ({"instruction": "q", "context": None, "input": "i", "output": "a"}, ("q", "i", "a")),
        ({"instruction": "", "input": "i", "output": "a"}, ("", "i", "a")),
        ({"instruction": " q\r\n", "input": "\ti ", "output": "\n 答え。 "}, (" q\r\n", "\ti ", "\n 答え。 ")),
        ({"instruction": "q", "output": "a", "history": [], "system": ""}, ("q", "", "a")),
        ({"instruction": "q", "output": "a", "history": None, "system": None, "instances": None}, ("q", "", "a")),
        ({"instruction": "x < y", "output": "<end|> </ s>"}, ("x < y", "", "<end|> </ s>")),
    ],
)
def test_alpaca_text_is_taken_as_it_is(row: dict[str, Any], wanted: tuple[str, str, str]) -> None:
    assert _one("alpaca", row).turns == (user(*wanted[:2]), answer(wanted[2]))


def test_alpaca_with_system_and_history() -> None:
    row = {"instruction": "q", "output": "a", "system": "s", "history": [["q1", "a1"], ["q2", "a2"]]}
    turns = (Turn("system", "s"), user("q1"), answer("a1"), user("q2"), answer("a2"), user("q"), answer("a"))
    assert _one("alpaca", row).turns == turns


def test_instances_are_rows_of_their_own() -> None:
    row = {"instruction": "q", "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b", "note": 1}], "id": 3}
    converter = Converter("alpaca", {})
    found = converter.convert(Record("f:1", row))
    assert isinstance(found, list)
    assert [(c.place, c.turns) for c in found] == [("f:1#1", (user("q"), answer("a"))), ("f:1#2", (user("q", "i"), answer("b")))]
    assert converter.ignored == {"id": 1, "instances[].note": 1}
    assert _one("alpaca", {"instruction": "q", "instances": [{"input": "i", "output": "a"}]}).place == "f:1"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = Call("", "f", {"x": "é", "n": 12345678901234567890})
ARGUMENTS = '{"x": "é", "n": 12345678901234567890}'


@pytest.mark.parametrize(
    ("form", "row", "turns"),
    [
        ("prompt_completion", {"prompt": "q ", "completion": " a"}, (user("q "), answer(" a"))),
        (
            "prompt_completion",
            {"prompt": [said("user", "q"), said("assistant", "x"), said("user", "r")], "completion": [said("assistant", "a")]},
            (user("q"), answer("x", supervised=False), user("r"), answer("a")),
        ),
        (
            "messages",
            {
                "messages": [
                    said("system", "s"),
                    said("user", "q"),
                    said("assistant", "a"),
                    said("user", "r"),
                    said("assistant", "b"),
                ]
            },
            (Turn("system", "s"), user("q"), answer("a"), user("r"), answer("b")),
        ),
        (
            "messages",
            {"messages": [said("user", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]), said("assistant", "c")]},
            (user("a b"), answer("c")),
        ),
        (
            "messages",
            {
                "messages": [
                    said("user", "q"),
                    said("assistant", "a", weight=0),
                    said("user", "r"),
                    said("assistant", "b", weight=1.0),
                ]
            },
            (user("q"), answer("a", supervised=False), user("r"), answer("b")),
        ),
        (
            "messages",
            {
                "messages": [
                    said("user", "q", name=None, tool_calls=None),
                    said(
                        "assistant",
                        None,
                        tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}],
                    ),
                    said("tool", "", tool_call_id="c1", name="f"),
                    said("assistant", "a", tool_calls=[]),
                ]
            },
            (user("q"), answer("", Call("c1", "f", CALL.arguments)), Turn("tool", "", name="f", call_id="c1"), answer("a")),
        ),
        (
            "messages",
            {
                "messages": [
                    said("user", "q"),
                    {"role": "assistant", "function_call": {"name": "f", "arguments": json.loads(ARGUMENTS)}},
                    said("function", "r"),
                    said("assistant", "a"),
                ]
            },
            (user("q"), answer("", CALL), Turn("tool", "r"), answer("a")),
        ),
        (
            "messages",
            {"messages": [said("user", "q"), said("assistant", "a", reasoning_content="hm")]},
            (user("q"), answer("<think>\nhm\n</think>\n\na")),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    from_("human", "q"),
                    from_("function_call", f'{{"name": "f", "arguments": {ARGUMENTS}}}'),
                    from_("observation", "r"),
                    from_("gpt", "a"),
                ],
                "system": "s",
            },
            (Turn("system", "s"), user("q"), answer("", CALL), Turn("tool", "r"), answer("a")),
        ),
        ("sharegpt", {"conversations": [said("user", "q"), said("assistant", "a")]}, (user("q"), answer("a"))),
    ],
)
def test_forms(form: Form, row: dict[str, Any], turns: tuple[Turn, ...]) -> None:
    assert _one(form, row).turns == turns
    assert detect([Record("f:1", row)], {}) == form


def test_turns_as_json_text() -> None:
    """All that a CSV file can hold of them."""
    row = {"messages": json.dumps([said("user", "q"), said("assistant", "a")])}
    assert _one("messages", row).turns == (user("q"), answer("a"))
    assert detect([Record("f:1", row)], {}) == "messages"
    found = _convert("sharegpt", {"conversations": "[{"})
    assert isinstance(found, Reject)
    assert found.reason == "not_a_list"


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), json.dumps([TOOL["function"]]), [TOOL], [TOOL["function"]]])
def test_tools_in_one_form(tools: object) -> None:
    row = {"conversations": [from_("human", "q"), from_("gpt", "a")], "tools": tools}
    assert _one("sharegpt", row).tools == (TOOL,)


@pytest.mark.parametrize("tools", [None, "", " ", "[]", []])
def test_no_tools(tools: object) -> None:
    assert _one("messages", {"messages": [said("user", "q"), said("assistant", "a")], "tools": tools}).tools == ()


def test_columns_are_mapped() -> None:
    row = {"question": "q", "answer": "a", "instruction": "hidden", "id": 1}
    columns = {"instruction": "question", "output": "answer"}
    converter = Converter("alpaca", columns)
    found = converter.convert(Record("f:1", row))
    assert isinstance(found, list)
    assert found[0].turns == (user("q"), answer("a"))
    assert converter.ignored == {"instruction (of the file)": 1, "id": 1}
    assert detect([Record("f:1", {"question": "q", "answer": "a"})], columns) == "alpaca"
    turns = {"dialog": [{"who": "human", "says": "q"}, {"who": "gpt", "says": "a"}]}
    assert _one("sharegpt", turns, {"conversations": "dialog", "from": "who", "value": "says"}).turns == (user("q"), answer("a"))


def test_params_know_the_same_columns() -> None:
    assert set(get_args(Column)) == {name for names in FIELDS.values() for name in names}


def test_the_form_most_rows_show_is_the_file_s() -> None:
    alpaca, chat = {"instruction": "q", "output": "a"}, {"messages": [], "prompt": "q"}
    assert detect([Record("f:1", r) for r in (chat, alpaca, alpaca)], {}) == "alpaca"
    assert detect([Record("f:1", r) for r in (chat, {"prompt": "q", "completion": "a"}, chat)], {}) == "messages"
    assert detect([Record("f:1", {"text": "q"})], {}) is None
    assert detect([], {}) is None


def test_ignored_keys_are_counted() -> None:
    converter = Converter("messages", {})
    for number in range(3):
        row = {"messages": [said("user", "q", mood="x"), said("assistant", "a")], "id": number, "\ud83d": 1}
        assert isinstance(converter.convert(Record("f:1", row)), list)
    assert converter.ignored == {"id": 3, "?": 3, "messages[].mood": 3}
    assert all(name.encode("utf-8") for name in converter.ignored)


Q, A = said("user", "q"), said("assistant", "a")
CALLS = said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])


def _calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [Q, said("assistant", None, tool_calls=list(calls), **more), said("tool", "r"), A]}


def _shared(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"conversations": list(turns), **more}


H, G = from_("human", "q"), from_("gpt", "a")

BAD: list[tuple[Form, Any, str]] = [
    ("alpaca", {}, "missing_field"),
    ("alpaca", {"output": "a"}, "missing_field"),
    ("alpaca", {"instruction": None, "output": "a"}, "missing_field"),
    ("alpaca", {"instruction": "q"}, "missing_field"),
    ("alpaca", {"instruction": "q", "output": None}, "missing_field"),
    *[("alpaca", {"instruction": "q", "output": v}, "not_text") for v in (6, 0, 1.5, True, False, [], {}, ["a"])],
    *[("alpaca", {"instruction": v, "output": "a"}, "not_text") for v in (6, 0, ["q"], {"q": 1}, False)],
    *[("alpaca", {"instruction": "q", "input": v, "output": "a"}, "not_text") for v in (0, 7, [], {}, False, ["i"])],
    *[("alpaca", {"instruction": "q", "context": v, "output": "a"}, "not_text") for v in (0, {}, [1])],
    *[("alpaca", {"instruction": "q", "output": v}, "empty_answer") for v in ("", " ", " \n", "\u2028", "\u3000\t")],
    *[("alpaca", {"instruction": v, "output": "a"}, "empty_question") for v in ("", " ", "\n\r", "\u00a0")],
    ("alpaca", {"instruction": " ", "input": "\n", "output": "a"}, "empty_question"),
    ("alpaca", {"instruction": "q", "input": "i", "context": "c", "output": "a"}, "unsupported_field"),
    ("alpaca", {"instruction": "q", "output": "a", "system": 3}, "not_text"),
    ("alpaca", {"instruction": "q", "output": "a", "system": " "}, "empty_turn"),
    ("alpaca", {"instruction": "q", "output": "a", "history": "x"}, "not_a_list"),
    ("alpaca", {"instruction": "q", "output": "a", "history": {"x": "y"}}, "not_a_list"),
    *[
        ("alpaca", {"instruction": "q", "output": "a", "history": [v]}, "not_a_list")
        for v in ("xy", [], ["x"], ["x", "y", "z"], 1)
    ],
    ("alpaca", {"instruction": "q", "output": "a", "history": [["x", None]]}, "not_text"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["x", ""]]}, "empty_answer"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["", "y"]]}, "empty_question"),
    ("alpaca", {"instruction": "q", "instances": []}, "no_turns"),
    ("alpaca", {"instruction": "q", "instances": "x"}, "not_a_list"),
    ("alpaca", {"instruction": "q", "instances": ["x"]}, "not_an_object"),
    ("alpaca", {"instruction": "q", "instances": [{"input": "i"}]}, "missing_field"),
    ("alpaca", {"instances": [{"input": "i", "output": "a"}]}, "missing_field"),
    ("alpaca", {"instruction": "q", "instances": [{"output": ""}]}, "empty_answer"),
    ("alpaca", {"instruction": "q", "instances": [{"output": "a"}, {"output": 1}]}, "not_text"),
    ("alpaca", {"instruction": "q", "output": "a", "instances": [{"output": "a"}]}, "unsupported_field"),
    ("prompt_completion", {"prompt": "q"}, "missing_field"),
    ("prompt_completion", {"completion": "a"}, "missing_field"),
    ("prompt_completion", {"prompt": None, "completion": "a"}, "missing_field"),
    ("prompt_completion", {"prompt": "", "completion": "a"}, "empty_question"),
    ("prompt_completion", {"prompt": "q", "completion": " "}, "empty_answer"),
    *[("prompt_completion", {"prompt": "q", "completion": v}, "not_text") for v in (1, [], {}, [A], True)],
    *[("prompt_completion", {"prompt": v, "completion": "a"}, "not_text") for v in (1, [], {}, [Q], False)],
    ("prompt_completion", {"prompt": 1, "completion": 2}, "not_text"),
    ("prompt_completion", {"prompt": [], "completion": []}, "no_turns"),
    ("prompt_completion", {"prompt": [Q], "completion": []}, "unanswered"),
    ("prompt_completion", {"prompt": [], "completion": [A]}, "role_order"),
    ("prompt_completion", {"prompt": [Q, A], "completion": [A]}, "role_order"),
    ("prompt_completion", {"prompt": [Q], "completion": [{**A, "weight": 0}]}, "nothing_supervised"),
    ("prompt_completion", {"prompt": "q", "completion": "a", "tools": "{"}, "bad_tools"),
    ("messages", {}, "missing_field"),
    ("messages", {"messages": None}, "missing_field"),
    *[("messages", {"messages": v}, "not_a_list") for v in ("x", {}, 1, True)],
    ("messages", {"messages": []}, "no_turns"),
    *[("messages", {"messages": [Q, v]}, "not_an_object") for v in ("a", None, 1, [A])],
    ("messages", {"messages": [Q]}, "unanswered"),
    ("messages", {"messages": [Q, A, Q]}, "unanswered"),
    ("messages", {"messages": [said("system", "s")]}, "unanswered"),
    ("messages", {"messages": [A]}, "role_order"),
    ("messages", {"messages": [A, Q, A]}, "role_order"),
    ("messages", {"messages": [Q, Q, A]}, "role_order"),
    ("messages", {"messages": [Q, A, A]}, "role_order"),
    ("messages", {"messages": [said("system", "s"), A]}, "role_order"),
    ("messages", {"messages": [said("system", "s"), said("system", "s"), Q, A]}, "role_order"),
    ("messages", {"messages": [Q, said("system", "s"), A]}, "role_order"),
    ("messages", {"messages": [Q, A, said("system", "s"), Q, A]}, "role_order"),
    ("messages", {"messages": [Q, said("tool", "r"), A]}, "role_order"),
    ("messages", {"messages": [Q, A, said("tool", "r"), A]}, "role_order"),
    ("messages", {"messages": [said("tool", "r"), A]}, "role_order"),
    ("messages", {"messages": [Q, CALLS, Q, A]}, "role_order"),
    ("messages", {"messages": [Q, CALLS, said("tool", "r"), Q, A]}, "role_order"),
    ("messages", {"messages": [Q, CALLS, said("tool", "r")]}, "unanswered"),
    *[("messages", {"messages": [said(v, "q"), A]}, "unknown_role") for v in ("human", "User", "developer", "", 1, ["user"])],
    ("messages", {"messages": [{"content": "q"}, A]}, "missing_field"),
    ("messages", {"messages": [said(None, "q"), A]}, "missing_field"),
    ("messages", {"messages": [{"role": "user"}, A]}, "missing_field"),
    ("messages", {"messages": [Q, said("assistant", None)]}, "missing_field"),
    ("messages", {"messages": [Q, said("assistant", None, tool_calls=[])]}, "missing_field"),
    ("messages", {"messages": [said("user", " "), A]}, "empty_question"),
    ("messages", {"messages": [Q, said("assistant", "")]}, "empty_answer"),
    ("messages", {"messages": [Q, said("assistant", []), Q, A]}, "empty_answer"),
    ("messages", {"messages": [said("system", ""), Q, A]}, "empty_turn"),
    *[("messages", {"messages": [said("user", v), A]}, "not_text") for v in (1, True, {"text": "q"}, [{"type": "image_url"}])],
    ("messages", {"messages": [said("user", [{"type": "text", "text": "q"}, {"type": "image"}]), A]}, "not_text"),
    ("messages", {"messages": [said("user", [{"type": "text"}]), A]}, "not_text"),
    ("messages", {"messages": [said("user", [{"text": "q"}]), A]}, "not_text"),
    ("messages", {"messages": [said("user", ["q"]), A]}, "not_an_object"),
    *[("messages", {"messages": [Q, {**A, "weight": v}]}, "bad_weight") for v in (2, 0.5, -1, "1", True, [1])],
    ("messages", {"messages": [{**Q, "weight": 1}, A]}, "bad_weight"),
    ("messages", {"messages": [Q, {**A, "weight": 0}]}, "nothing_supervised"),
    ("messages", {"messages": [said("user", "q", tool_calls=[1]), A]}, "bad_tool_call"),
    ("messages", _calling("x"), "bad_tool_call"),
    ("messages", _calling({}), "bad_tool_call"),
    ("messages", _calling({"function": {"name": "f"}}), "bad_tool_call"),
    ("messages", _calling({"function": {"arguments": "{}"}}), "bad_tool_call"),
    ("messages", _calling({"function": {"name": "", "arguments": "{}"}}), "bad_tool_call"),
    *[
        ("messages", _calling({"function": {"name": "f", "arguments": v}}), "bad_tool_call")
        for v in ("{", "[]", "1", 1, [1], "NaN")
    ],
    ("messages", _calling({"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}), "bad_tool_call"),
    ("messages", _calling({"function": {"name": "f", "arguments": '{"a": NaN}'}}), "bad_tool_call"),
    ("messages", _calling({"function": {"name": "f", "arguments": "{}"}}, function_call={"name": "f"}), "bad_tool_call"),
    ("messages", {"messages": [Q, said("assistant", None, tool_calls={"f": 1}), said("tool", "r"), A]}, "bad_tool_call"),
    ("messages", {"messages": [Q, CALLS, said("tool", None), A]}, "missing_field"),
    ("messages", {"messages": [Q, CALLS, said("tool", "r", name=3), A]}, "not_text"),
    ("messages", {"messages": [Q, {**A, "reasoning_content": 1}]}, "not_text"),
    *[
        ("messages", {"messages": [Q, A], "tools": v}, "bad_tools")
        for v in ("{", "{}x", {"name": "f"}, 1, ["f"], [{}], [{"name": 1}])
    ],
    ("sharegpt", {}, "missing_field"),
    ("sharegpt", _shared(), "no_turns"),
    ("sharegpt", {"conversations": "x"}, "not_a_list"),
    ("sharegpt", _shared(H), "unanswered"),
    ("sharegpt", _shared(G), "role_order"),
    ("sharegpt", _shared(G, H), "role_order"),
    ("sharegpt", _shared(H, H, G), "role_order"),
    ("sharegpt", _shared(H, G, G), "role_order"),
    ("sharegpt", _shared(H, from_("observation", "r"), G), "role_order"),
    ("sharegpt", _shared(from_("system", "s"), H, G, system="s"), "role_order"),
    ("sharegpt", _shared(from_("system", ""), H, G), "empty_turn"),
    ("sharegpt", _shared(from_("human", ""), G), "empty_question"),
    ("sharegpt", _shared(H, from_("gpt", "\n")), "empty_answer"),
    *[("sharegpt", _shared(from_(v, "q"), G), "unknown_role") for v in ("Human", "bot", "", 2)],
    ("sharegpt", _shared({"value": "q"}, G), "missing_field"),
    ("sharegpt", _shared({"from": "human"}, G), "missing_field"),
    ("sharegpt", _shared(H, from_("gpt", None)), "missing_field"),
    ("sharegpt", _shared(from_("human", 1), G), "not_text"),
    ("sharegpt", _shared(from_("human", ["q"]), G), "not_text"),
    ("sharegpt", _shared("q", "a"), "not_an_object"),
    *[
        ("sharegpt", _shared(H, from_("function_call", v), from_("observation", "r"), G), "bad_tool_call")
        for v in ("", "f(x)", "{", "[]", "1", '{"name": "f"}', '{"arguments": {}}', '{"name": "f", "arguments": "x"}', '["f"]')
    ],
    ("sharegpt", _shared(H, from_("function_call", '{"name": "f", "arguments": {}}'), G), "role_order"),
    *[("sharegpt", _shared(H, G, tools=v), "bad_tools") for v in ("x", "[1]", '{"a": 1}', '[{"description": "d"}]')],
    ("sharegpt", _shared(H, G, system=["s"]), "not_text"),
]


@pytest.mark.parametrize(("form", "row", "reason"), BAD)
def test_bad_rows_say_why(form: Form, row: Any, reason: str) -> None:
    found = _convert(form, row)
    assert isinstance(found, Reject)
    assert (found.place.split("#")[0], found.reason) == ("f:1", reason)
    assert found.detail
    assert "\n" not in found.detail
    json.dumps(found.detail).encode("utf-8")


def test_there_are_many_kinds_of_bad_rows() -> None:
    assert len({json.dumps([form, row], default=str) for form, row, _ in BAD}) == len(BAD) >= 150
