"""The Jinja that chat templates are written in, as transformers runs them, in a sandbox.

Contract: `sandbox` makes an environment in which a template can print, loop and compare, and reach nothing else: no file, no
clock, no attribute of Python's. What transformers adds to Jinja is there: `raise_exception`, UTF-8 `tojson`, loop controls and
`{% generation %}`.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.dataset.frames import look


class _Generation(Extension):
    """`{% generation %}`: a marker some templates carry around answers; here it only renders its body."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride] - a class variable there too

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def sandbox() -> ImmutableSandboxedEnvironment:
    """A fresh environment; blocks are trimmed, as chat templates expect."""
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
        look(value)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.globals["raise_exception"] = raise_exception  # pyright: ignore[reportUnknownMemberType] - a bare dict in jinja2
    environment.filters["tojson"] = tojson  # pyright: ignore[reportUnknownMemberType] - a bare dict in jinja2
    return environment
