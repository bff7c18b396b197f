"""Conversations to text parts under an instruction template.

Contract: a rendered conversation is a tuple of parts, context and supervised in turn, beginning with context:
`(prompt, answer + stop token, what follows up to the next answer, answer + stop token, ...)`. Joined, the parts are the
text the model reads. The text before an answer is what the template gives the model when it is to answer there; where
it is not, because the template writes earlier turns anew once they are past, the conversation is refused, or made one
row for each answer. Each answer is followed by one stop token, read off the template, and nothing follows the last.
A template that leaves out a turn, a call or the tools refuses the row too. `rendering.py` says what a template gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.config.errors import DataError, ModelError
from pipeline.dataset.conversation import Call, Conversation, Turn
from pipeline.dataset.cutting import Cutter
from pipeline.dataset.fragments import NOWHERE, Cuts
from pipeline.dataset.frames import Frame, Noted, Notes, frame_of, marked
from pipeline.dataset.rendering import NAMED, Renderer, special_token_map, special_tokens

Parts = tuple[str, ...]
Supervise = Literal["every_turn", "last_turn", "all_text"]
Reasoning = Literal["keep", "strip", "split"]

_FOLDER = Path(__file__).parent / "templates"
_PROBE = Conversation("probe", (Turn("user", "a question"), Turn("assistant", "an answer", "", True)))
_THOUGHT_OPENED = re.compile(r"<think>\s*")

_CHECKED_ROWS = 4
"""Rows of each sequence of roles that are rendered both ways before its frame is relied on."""
_MOST_FRAMES = 4096
"""Sequences of roles that are remembered; further ones are rendered in full."""


class Rewritten(DataError):
    """The template writes an earlier turn anew once it is past."""


class Template:
    """A template ready for use.

    stop_token: text of the token that ends an answer. digest: SHA-256 of the template's source.
    """

    def __init__(
        self,
        name: str,
        source: str,
        model: Path,
        *,
        supervise: Supervise,
        reasoning: Reasoning,
    ) -> None:
        self._renderer = Renderer(name, source, model)
        self.name, self.digest, self._other = name, self._renderer.digest, self._renderer.other
        self._supervise, self._split = supervise, reasoning == "split"
        self.frames: dict[tuple[object, ...], Frame | None] = {}
        self._unchecked: dict[tuple[object, ...], int] = {}
        whole, prompt = (self._renderer.text(_PROBE, count) for count in (2, 1))
        if not whole.startswith(prompt):
            raise Rewritten(self._renderer.said(_PROBE, "writes another prompt with an answer than without", self._other))
        self._opening, found, closing = whole[len(prompt) :].rpartition(_PROBE.turns[1].content)
        if not found:
            raise DataError(self._renderer.said(_PROBE, "changes the answer", self._other))
        self.stop_token = _stop_token(name, closing, special_tokens(model))
        self._gap = closing[: len(closing) - len(closing.lstrip())]
        self._left_out = self._not_printed()
        self._cutter = Cutter(self._renderer, self.stop_token, self._parts)

    def rows(self, conversation: Conversation) -> list[Parts]:
        """The parts of a conversation: one row, or one for each answer where the policy splits what cannot be one.
        DataError for a conversation that the template refuses or changes."""
        answers = self._answers(conversation)
        try:
            rows = [self._parts(conversation, answers)]
        except Rewritten:
            if not self._split:
                raise
            until = (Conversation(conversation.place, conversation.turns[: n + 1], conversation.tools) for n in answers)
            rows = [self._parts(one, [len(one.turns) - 1]) for one in until]
        return [("", "".join(row)) for row in rows] if self._supervise == "all_text" else rows

    def cuts(self, conversation: Conversation, parts: Parts) -> Cuts:
        """Where a row of `rows` may be cut, should it be too long."""
        return self._cutter.cuts(conversation, self._answers(conversation), parts) if len(parts) > 2 else NOWHERE

    def _answers(self, conversation: Conversation) -> list[int]:
        """Which turns are trained on. DataError where the policy leaves none."""
        turns = conversation.turns
        answers = [1] if len(turns) == 2 else [number for number, turn in enumerate(turns) if turn.supervised]
        if self._supervise == "last_turn":
            last = max(number for number, turn in enumerate(turns) if turn.role == "assistant")
            answers = [last] if last in answers else []
            if not answers:
                raise DataError(f"{conversation.place}: the last answer has weight 0, and format.supervise is last_turn")
        elif self._supervise == "all_text":
            answers = answers[-1:]
        return answers

    def _parts(self, conversation: Conversation, answers: Sequence[int]) -> Parts:
        """Parts from the frame of this sequence of roles, or rendered in full."""
        turns = conversation.turns
        if not self._renderer.framed or conversation.tools:
            return self._full(conversation, answers, str)
        contents: list[str] = []
        for turn in turns:
            if not turn.content or turn.calls or turn.name or turn.call_id:
                return self._full(conversation, answers, str)
            if turn.input:
                contents += (turn.text, turn.content, turn.input)
            else:
                contents.append(turn.content)
        shape = (*answers, *[turn.role if not turn.input else "input" for turn in turns])
        if shape not in self.frames:
            if len(self.frames) == _MOST_FRAMES:
                return self._full(conversation, answers, str)
            self.frames[shape] = self._frame(conversation, answers)
            self._unchecked[shape] = _CHECKED_ROWS
        frame = self.frames[shape]
        if frame is None:
            return self._full(conversation, answers, str)
        parts = frame.filled(contents)
        if self._unchecked[shape]:
            self._unchecked[shape] -= 1
            full = self._full(conversation, answers, str)
            if parts != full:
                self.frames[shape] = None
            return full
        return parts

    def _frame(self, conversation: Conversation, answers: Sequence[int]) -> Frame | None:
        """The frame of a conversation's roles; None where the template looks into contents or does not print each once."""
        notes = Notes()
        turns: list[Turn] = []
        choices: list[tuple[set[int], ...]] = []
        pairs: dict[str, str] = {}
        count = 0
        for turn in conversation.turns:
            if turn.input:
                turns.append(Turn(turn.role, marked(count + 1), marked(count + 2)))
                pairs[turns[-1].text] = marked(count)
                choices.append(({count}, {count + 1, count + 2}))
                count += 3
            else:
                turns.append(Turn(turn.role, marked(count)))
                choices.append(({count},))
                count += 1
        stand_in = Conversation(conversation.place, tuple(turns))

        def note(text: str) -> str:
            return Noted(text, notes)

        try:
            parts = self._full(stand_in, answers, note)
        except DataError:
            return None  # rendering the row in full says why
        if notes.looked:
            return None
        frame = frame_of([_as_one(part, pairs) for part in parts])
        if frame is None or any(not (a <= frame.used) for a in _chosen(choices[: answers[-1] + 1], frame.used)):
            return None
        return frame

    def _full(self, conversation: Conversation, answers: Sequence[int], wrap: Callable[[str], str]) -> Parts:
        turns, stop = conversation.turns, self.stop_token
        whole = self._renderer.text(conversation, len(turns), wrap)
        self._check_complete(conversation, whole)
        parts: list[str] = []
        at = 0
        for number in answers:
            prompt = self._renderer.text(conversation, number, wrap, prompt=True)
            if not whole.startswith(prompt):
                raise Rewritten(
                    self._renderer.said(
                        conversation,
                        "writes another prompt with an answer than without",
                        f"set format.reasoning to split, or {self._other}",
                    )
                )
            start, answer, end = self._answer(conversation, number, whole, len(prompt))
            parts += (whole[at:start], answer + stop)
            at = end
        return tuple(parts)

    def _answer(self, conversation: Conversation, number: int, whole: str, start: int) -> tuple[int, str, int]:
        """Where in the whole text the answer of a turn begins, what it is, and where its stop token ends.

        No content spells a stop token, so the first one ends the turn. Between prompt and answer may stand what the
        template writes before any answer, such as an empty `<think>` block: the model is given it, so it is context.
        """
        turn = conversation.turns[number]
        stop = whole.find(self.stop_token, start)
        if stop < 0:
            raise DataError(self._renderer.said(conversation, f"ends turn {number + 1} with no {self.stop_token}", self._other))
        end = stop + len(self.stop_token)
        if turn.calls:
            said = whole[start:stop].removeprefix(self._opening)
            if not (all(call.name in said for call in turn.calls) and turn.content.strip() in said):
                raise DataError(self._renderer.said(conversation, f"leaves out the call of turn {number + 1}", self._other))
            return stop - len(said), said, end
        for answer in (turn.content, turn.content.strip()):  # some templates strip
            begin = stop - len(self._gap) - len(answer)
            if not whole.startswith(answer + self._gap, begin):
                continue
            if begin >= start and whole[start:begin] in ("", self._opening):
                return begin, answer, end
            if begin < start and _THOUGHT_OPENED.fullmatch(whole[begin:start]):  # the prompt opens the thought
                return start, whole[start : stop - len(self._gap)], end
        last = number == len(conversation.turns) - 1
        raise (DataError if last else Rewritten)(
            self._renderer.said(
                conversation, "changes the answer", self._other if last else f"set format.reasoning to split, or {self._other}"
            )
        )

    def _not_printed(self) -> frozenset[str]:
        """Which of system turn, tools, calls and tool results the template passes over, tried with words no text holds."""
        answer = _PROBE.turns[1]
        function: dict[str, Any] = {"name": marked(1), "description": "d", "parameters": {"type": "object", "properties": {}}}
        calling = Turn("assistant", "", "", True, (Call("123456789", marked(2), {"a": "b"}),))
        result = Turn("tool", marked(3), name="f", call_id="123456789")
        tools: tuple[Mapping[str, Any], ...] = ({"type": "function", "function": function},)
        trials = {
            "a system turn": (0, Conversation("probe", (Turn("system", marked(0)), *_PROBE.turns))),
            "tools": (1, Conversation("probe", _PROBE.turns, tools)),
            "calls": (2, Conversation("probe", (_PROBE.turns[0], calling, result, answer), tools)),
            "results of tools": (3, Conversation("probe", (_PROBE.turns[0], calling, result, answer), tools)),
        }
        found: set[str] = set()
        for what, (number, trial) in trials.items():
            try:
                text = self._renderer.text(trial, len(trial.turns), str)
            except DataError:  # so will a row, with its own words
                continue
            if marked(number)[1:-1] not in _marks(text):
                found.add(what)
        return frozenset(found)

    def _check_complete(self, conversation: Conversation, whole: str) -> None:
        """DataError where the text lacks a turn that was said to the model, a call or the tools."""
        has = {
            "a system turn": conversation.turns[0].role == "system",
            "tools": bool(conversation.tools),
            "calls": any(turn.calls for turn in conversation.turns),
            "results of tools": any(turn.role == "tool" for turn in conversation.turns),
        }
        for what in self._left_out:
            if has[what]:
                raise DataError(self._renderer.said(conversation, f"leaves out {what}", _OTHER_DATA))
        for number, turn in enumerate(conversation.turns, start=1):
            if turn.role != "assistant":
                for text in (turn.content.strip(), turn.input.strip()):
                    if text not in whole and json.dumps(text, ensure_ascii=False)[1:-1] not in whole:
                        raise DataError(self._renderer.said(conversation, f"leaves out turn {number} ({turn.role})", _OTHER_DATA))
        for tool in conversation.tools:
            if tool["function"]["name"] not in whole:
                raise DataError(self._renderer.said(conversation, "leaves out the tools", _OTHER_DATA))


_OTHER_DATA = "take another template, or map the rows to a form without it"


def load_template(
    name: str, own: str | None, model: Path, *, supervise: Supervise = "every_turn", reasoning: Reasoning = "keep"
) -> Template:
    """The template `name` for the tokenizer in `model`; ModelError where the two do not fit."""
    special = special_token_map(model)
    if name == "chat":
        path = model / "chat_template.jinja"
        if not path.is_file():
            raise ModelError(f"template 'chat': the base model has no chat template; {NAMED}, or another base")
        source = path.read_text(encoding="utf-8")
    else:
        source = own if own is not None else (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        if own is None and "eos_token" not in special:
            raise ModelError(
                f"template '{name}': the base model's tokenizer names no eos token, which ends an answer; use 'chat'"
            )
    return Template(name, source, model, supervise=supervise, reasoning=reasoning)


def _as_one(part: str, pairs: Mapping[str, str]) -> str:
    """A content and its input that the template prints as one text are that text."""
    for pair, one in pairs.items():
        part = part.replace(pair, one)
    return part


def _chosen(choices: Sequence[tuple[set[int], ...]], used: frozenset[int]) -> list[set[int]]:
    """For each turn the way of printing it that the frame takes: the first whose stand-ins it uses."""
    return [next((c for c in ways if c & used), ways[0]) for ways in choices]


def _marks(text: str) -> set[str]:
    return set(re.findall("\ue000(.*?)\ue001", text))


def _stop_token(name: str, after: str, candidates: tuple[str, ...]) -> str:
    """The special token with which a template ends an answer."""
    found = [token for token in candidates if after.lstrip().startswith(token)]
    if not found:
        raise ModelError(
            f"template '{name}': an answer is followed by {after[:20]!r}, which begins with no special token, so the model "
            f"could not learn to stop; {NAMED}"
        )
    return max(found, key=len)
