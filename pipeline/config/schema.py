"""YAML files against the schema: loading, one-line errors, the published JSON schema.

Contract: `load_params` and `load_profile` return a checked object or raise ConfigError whose one
line names file, key, value, rule and, for an unknown key, the nearest valid one. YAML is read by
the reader DVC uses (YAML 1.2: `1e-5` is a number), so that both see the same values.

Command: `ladder schema --check` compares the published files with the code.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.config.errors import ConfigError
from pipeline.config.params import Params
from pipeline.config.profile import Profile

Model = TypeVar("Model", bound=BaseModel)

PUBLISHED: Mapping[str, type[BaseModel]] = {"params.schema.json": Params, "profile.schema.json": Profile}
"""Published schema files and the classes they are made from."""


def load_params(path: Path) -> Params:
    """Read and check a whole params.yaml."""
    return _checked(path, Params)


def load_profile(path: Path) -> Profile:
    """Read and check one profile."""
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise ConfigError(f"{path}: no such profile; a rung needs one, and there are: {', '.join(known) or 'none'}")
    return _checked(path, Profile)


def json_schema(model: type[BaseModel]) -> str:
    """The JSON schema of a section class, as published (draft 2020-12)."""
    return json.dumps(model.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def _checked(path: Path, model: type[Model]) -> Model:
    data = _read_yaml(path)
    try:
        # JSON is the one form in which pydantic's strict mode takes a list for a list and an int for a float.
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {_foreign(data) or error}: not text, a finite number, a list or a mapping; write a date as quoted text"
        ) from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        # A misspelt key is reported as unknown and the right one as missing: the first of the two helps.
        problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{path}: {_explain(problems[0], data, model)}{more}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; run from the repository, or copy one from examples/") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    try:
        data: object = YAML(typ="safe", pure=True).load(text)  # pyright: ignore[reportUnknownMemberType]
    except YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem: str = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}, not a mapping of sections")
    return cast("dict[str, Any]", data)


def _foreign(value: Any, key: str = "", inside: tuple[int, ...] = ()) -> str | None:
    """`KEY = VALUE` of the first value that JSON has no form for, such as a date or an infinity."""
    above = (*inside, id(value))
    if id(value) in inside:
        return f"{key} = itself"
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(cast("dict[Any, Any]", value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast("list[Any]", value)))
    else:
        plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        return None if plain else f"{key} = {value}"
    found = (_foreign(v, f"{key}.{k}" if key else str(k), above) for k, v in items)
    return next((text for text in found if text), None)


def _explain(problem: ErrorDetails, data: Any, model: type[BaseModel]) -> str:
    location = _without_tags(problem["loc"], data)
    key = ".".join(str(part) for part in location) or "the file"
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return f"{key}: missing; every value must be stated, there are no defaults"
    if kind == "extra_forbidden":
        names = _names_at(location[:-1], data, model)
        close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"valid here: {', '.join(names)}"
        return f"{key} = {_short(value)}: unknown key; {hint}"
    rule = problem["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        context = problem.get("ctx", {})
        key, value = f"{key}.kind", str(context["tag"])
        rule = f"must be one of {context['expected_tags']}{_nearest(value, str(context['expected_tags']))}"
    if kind == "literal_error":
        expected = str(problem.get("ctx", {}).get("expected"))
        rule = f"must be {expected}{_nearest(str(value), expected)}"
    if kind == "value_error":
        return f"{key}: {rule}"
    return f"{key} = {_short(value)}: {rule}"


def _nearest(value: str, quoted: str) -> str:
    """`; did you mean 'x'?` for the nearest of some quoted names, or nothing."""
    close = difflib.get_close_matches(value, quoted.split("'")[1::2], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _without_tags(location: tuple[int | str, ...], data: Any) -> tuple[int | str, ...]:
    """Drop the names of union branches, which pydantic puts among the keys (`train.tuning.lora.rank`)."""
    kept: list[int | str] = []
    here = data
    entered = True  # the name of a branch follows at once, and may be a key in it too (`base.path.path`)
    for part in location:
        if isinstance(here, dict):
            keys = cast("dict[Any, Any]", here)
            if entered and part == keys.get("kind"):
                entered = False
                continue
            here, entered = keys.get(part), True
        elif isinstance(here, list) and isinstance(part, int):
            here = cast("list[Any]", here)[part]
        elif here is not None:  # a scalar: what follows names branches of a union such as `int | "auto"`
            break
        kept.append(part)
    return tuple(kept)


def _names_at(location: tuple[int | str, ...], data: Any, model: type[BaseModel]) -> list[str]:
    """Field names valid inside the mapping at `location`, its `kind` considered."""
    current: type[BaseModel] = model
    here = data
    for part in location:
        if isinstance(part, int):  # an item of a list, whose class was found under the list's key
            here = cast("list[Any]", here)[part] if isinstance(here, list) else None
            continue
        here = cast("dict[Any, Any]", here)[part] if isinstance(here, dict) else None
        annotation = current.model_fields[str(part)].annotation
        options = [annotation, *get_args(annotation), *(inner for a in get_args(annotation) for inner in get_args(a))]
        classes = [c for c in options if isinstance(c, type) and issubclass(c, BaseModel)]
        if not classes:
            return []
        kind = cast("dict[str, Any]", here).get("kind") if isinstance(here, dict) else None
        matching = [c for c in classes if "kind" in c.model_fields and kind in get_args(c.model_fields["kind"].annotation)]
        current = (matching or classes)[0]
    return list(current.model_fields)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
