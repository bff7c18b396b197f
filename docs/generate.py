"""Write the generated parts of README.md and docs/*.md from the code.

Contract: a block stands between `<!-- generated: NAME -->` and `<!-- end -->`; what is inside is what `BLOCKS[NAME]` returns, and
the rest of the file is left alone. Sources: dvc.yaml (stages, graph), the pydantic classes (params, profile), the typer
application (verbs). Nothing generated depends on params.yaml, so a user's own values never make the docs stale.

Command: `python -m docs.generate` writes, `python -m docs.generate --check` exits 1 and names what it would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from ruamel.yaml import YAML

from pipeline.cli import app
from pipeline.config.errors import ConfigError, LadderError
from pipeline.config.schema import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent

_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CODE = ("pipeline", "stages")


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold generated blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def filled(text: str, place: str) -> str:
    """`text` with every block up to date; ConfigError for a name that nothing generates."""

    def content(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ConfigError(f"{place}: generated block '{match[2]}': no such block; there are: {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}"

    return _BLOCK.sub(content, text)


def stale(root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file that differs from the code."""
    texts = {path: path.read_text(encoding="utf-8") for path in documents(root)}
    new = {path: filled(text, path.relative_to(root).as_posix()) for path, text in texts.items()}
    return {path: text for path, text in new.items() if text != texts[path]}


# The stages, from dvc.yaml.


@dataclass(frozen=True)
class _Stage:
    """A stage as dvc.yaml states it; RUNG stands for an item of a `foreach` stage, BELOW for the rung below it."""

    name: str
    what: str
    sections: list[str]
    reads: list[str]
    """Dependencies that are not code."""
    makes: list[str]


def _stages() -> list[_Stage]:
    declared: Mapping[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return [_stage(word, body) for word, body in declared.items()]


def _stage(word: str, body: Mapping[str, Any]) -> _Stage:
    stage = body.get("do", body)

    def paths(*keys: str) -> list[str]:
        entries = [entry for key in keys for entry in stage.get(key, [])]
        return [_named(next(iter(entry)) if isinstance(entry, dict) else entry) for entry in entries]

    return _Stage(
        name=f"{word}@RUNG" if "foreach" in body else word,
        what=_named(stage["desc"]),
        sections=stage["params"],
        reads=[path for path in paths("deps") if path.split("/")[0] not in _CODE],
        makes=paths("outs", "plots", "metrics"),
    )


def _named(text: str) -> str:
    return text.replace("${key}", "RUNG").replace("${item}", "BELOW")


def stages_table() -> str:
    rows = [(f"`{s.name}`", s.what, _code(s.sections), _code(s.reads), _code(s.makes)) for s in _stages()]
    return _table(("stage", "what it does", "params", "needs", "makes"), rows)


def graph() -> str:
    """A flowchart: inputs and stages, an arrow per path that one makes and the next reads.

    Arrows between stages that follow from others are left out. A dotted one leads from a rung to the next.
    """
    stages = _stages()
    made = {path: stage.name for stage in stages for path in stage.makes}
    lines = [f'    {_node(stage.name)}["{stage.name}"]' for stage in stages]
    passed: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        for path in stage.reads:
            makers = dict.fromkeys(maker for out, maker in made.items() if Path(out).is_relative_to(path))
            for maker in makers:
                passed.setdefault((maker, stage.name), []).append(path)
            above = made.get(path.replace("BELOW", "RUNG"))
            if not makers and above:
                lines.append(f'    {_node(above)} -.->|"the next rung"| {_node(stage.name)}')
            elif not makers:
                lines.append(f'    {_node(path)}[("{path}")] --> {_node(stage.name)}')
    edges = set(passed)
    for maker, reader in passed:
        if not any(_leads(via, reader, edges) for start, via in edges if start == maker and via != reader):
            lines.append(f'    {_node(maker)} -->|"{", ".join(passed[maker, reader])}"| {_node(reader)}')
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def _leads(start: str, end: str, edges: set[tuple[str, str]]) -> bool:
    return start == end or any(_leads(reader, end, edges) for maker, reader in edges if maker == start)


def _node(name: str) -> str:
    return re.sub(r"\W", "_", name)


# Params and profiles, from the JSON schemas of their classes.


def params_reference() -> str:
    schema = PUBLISHED["params.schema.json"].model_json_schema()
    return "\n\n".join(part for name in schema["properties"] for part in _section(name, schema["properties"][name], schema))


def profile_reference() -> str:
    schema = PUBLISHED["profile.schema.json"].model_json_schema()
    return _fields(schema, schema)


def _section(name: str, node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    """Heading, sentence and table of a section; one heading per kind where it is a choice; nested sections after it."""
    for variant in node.get("oneOf", [node]):
        section = _resolved(variant, schema)
        kind = section["properties"].get("kind", {}).get("const")
        yield f"## {name}" + (f", kind {kind}" if kind else "")
        yield _sentence(section)
        yield _fields(section, schema, name)
        for key, value in section["properties"].items():
            inner = _inner_section(value)
            if inner is not None:
                yield from _section(f"{name}.{key}", inner, schema)


def _fields(section: Mapping[str, Any], schema: Mapping[str, Any], name: str = "") -> str:
    rows = [
        (
            f"`{key}`",
            f"{_shape(node)}, see {name}.{key} below" if _inner_section(node) is not None else _type(node),
            _sentence(node) or _sentence(_resolved(node, schema)),
        )
        for key, node in section["properties"].items()
    ]
    return _table(("key", "type", "meaning"), rows)


def _inner_section(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a value is, is a list of, or may be instead of null; None where it is none of these."""
    candidates = [node, node.get("items", {}), *node.get("anyOf", [])]
    return next((c for c in candidates if "$ref" in c or "oneOf" in c), None)


def _shape(node: Mapping[str, Any]) -> str:
    return "a list of sections" if "items" in node else "a section or null" if "anyOf" in node else "a section"


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _sentence(node: Mapping[str, Any]) -> str:
    return " ".join(node.get("description", "").split())


_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}


def _type(node: Mapping[str, Any]) -> str:
    """A JSON schema type in words."""
    if "anyOf" in node:
        return " or ".join(map(_type, node["anyOf"]))
    values = node.get("enum", [node["const"]] if "const" in node else [])
    if values:
        return " or ".join(f"`{value}`" for value in values)
    if "type" not in node:
        return "any value"
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    if node["type"] == "object":
        return f"mapping of names to {_type(node['additionalProperties'])}"
    bounds = [f"{word} {node[key]:g}" for key, word in _BOUNDS.items() if key in node]
    if "pattern" in node:
        bounds.append(f"matching `{node['pattern']}`")
    return " ".join([_WORDS[node["type"]], ", ".join(bounds)]).strip()


# The verbs, from the typer application.


def verbs_table() -> str:
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    return _table(("command", "what it does"), [(f"`{_usage(name, c)}`", c.help) for name, c in commands.items()])


def _usage(name: str, command: Any) -> str:
    words = [p.name.upper() if p.param_type_name == "argument" else p.opts[0] for p in command.params]
    return " ".join(["ladder", name, *(w if p.required else f"[{w}]" for w, p in zip(words, command.params, strict=True))])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "stages": stages_table,
    "graph": graph,
    "verbs": verbs_table,
    "params": params_reference,
    "profile": profile_reference,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description="Write the generated parts of the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs from the code")
    check: bool = parser.parse_args().check
    try:
        changed = stale()
    except LadderError as error:
        print(f"docs: {error}", file=sys.stderr)
        return error.exit_code
    for path, text in changed.items():
        name = path.relative_to(ROOT).as_posix()
        if check:
            print(f"docs: {name}: not what the code says; `make docs` writes it", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(name)
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
