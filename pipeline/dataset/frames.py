"""What a template writes around contents, found once for a sequence of roles and then filled in.

Contract: a frame is used only where the template is proved not to look into the contents: it is rendered with
contents that note every operation but printing, joining with `+`, and asking whether they are empty. Constructs
through which such a note could be lost (`~` and `%` inside expressions, macros, captured blocks, filters that
render to text) rule frames out for the whole template. A template that trims, splits or compares is rendered in full.

Rendering a row in full takes 40-60 us a call, a frame 1 us.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from jinja2 import nodes

_MARK = re.compile("\ue000(\\d+)\ue001")
_TRANSPARENT_FILTERS = frozenset({"trim", "tojson", "string", "length", "count", "upper", "lower", "replace", "default", "d"})
"""Filters that call a method of their text, hand it on unchanged, or (tojson) are ours and look for notes."""


class Notes:
    """Whether a template looked into a content."""

    def __init__(self) -> None:
        self.looked = False


class Noted(str):
    """A content that notes each operation whose result depends on what it says."""

    notes: Notes

    def __new__(cls, text: str, notes: Notes) -> Noted:
        made = super().__new__(cls, text)
        made.notes = notes
        return made

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return bool(str.__len__(self))

    def __add__(self, other: str) -> str:
        return Noted(str.__add__(self, other), self.notes)

    def __radd__(self, other: str) -> str:
        return Noted(str.__add__(other, self), self.notes)


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Noted, *args: Any, **kwargs: Any) -> Any:
        self.notes.looked = True
        return plain(self, *args, **kwargs)

    return method


_SILENT = {
    *("__new__", "__init__", "__class__", "__getattribute__", "__str__", "__bool__", "__add__", "__radd__", "__doc__"),
    *("__init_subclass__", "__subclasshook__", "__setattr__", "__delattr__", "__dir__", "__reduce__", "__reduce_ex__"),
    *("__getnewargs__", "__getstate__", "__sizeof__", "maketrans"),
}
for _name in set(dir(str)) - _SILENT:
    setattr(Noted, _name, _noting(_name))


def look(value: Any) -> None:
    """Note that a filter of ours reads everything in a value."""
    if isinstance(value, Noted):
        value.notes.looked = True
    elif isinstance(value, dict):
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType] - whatever a template hands over
            look(key)
            look(inner)
    elif isinstance(value, list | tuple):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            look(inner)


def allows_frames(tree: nodes.Template) -> bool:
    """Whether every look into a content would be noted."""
    if next(tree.find_all((nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Include)), None):
        return False
    if any(f.name not in _TRANSPARENT_FILTERS for f in tree.find_all(nodes.Filter)):
        return False
    if any(not (isinstance(m.right, nodes.Const) and isinstance(m.right.value, int)) for m in tree.find_all(nodes.Mod)):
        return False
    printed = {id(child) for output in tree.find_all(nodes.Output) for child in output.nodes}
    return all(id(concat) in printed for concat in tree.find_all(nodes.Concat))


def marked(number: int) -> str:
    """Stand-in for content `number`."""
    return f"\ue000{number}\ue001"


@dataclass(frozen=True)
class Frame:
    """For each part, a `%` pattern and the numbers of the contents that fill it."""

    fillers: tuple[Callable[[Sequence[str]], str], ...]
    used: frozenset[int]

    def filled(self, contents: Sequence[str]) -> tuple[str, ...]:
        return tuple([fill(contents) for fill in self.fillers])


def frame_of(parts: Sequence[str]) -> Frame | None:
    """The frame of parts rendered from stand-ins; None where one occurs twice."""
    numbers = [int(n) for part in parts for n in _MARK.findall(part)]
    if len(set(numbers)) != len(numbers):
        return None
    return Frame(tuple(_filler(part) for part in parts), frozenset(numbers))


def _filler(part: str) -> Callable[[Sequence[str]], str]:
    pieces = _MARK.split(part)  # constant, number, constant, ..., constant
    pattern = "%s".join(piece.replace("%", "%%") for piece in pieces[::2])
    numbers = [int(n) for n in pieces[1::2]]
    if not numbers:
        return lambda _: part
    pick: Callable[[Sequence[str]], Any] = itemgetter(*numbers)
    if len(numbers) == 1:
        before, after = pieces[0], pieces[2]
        return lambda contents: before + pick(contents) + after
    return lambda contents: pattern % pick(contents)
