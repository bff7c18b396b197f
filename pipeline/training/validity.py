"""A DeepSpeed configuration held against the installed DeepSpeed, before any process starts.

Contract: `problem` builds DeepSpeed's own configuration from the dictionary and watches which keys it asks for. What its models
refuse, and what nothing asks for, is a problem; DeepSpeed itself passes over unknown keys at the top and in the blocks that are
no pydantic models. torch and DeepSpeed are imported inside (3 s).
"""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.config.errors import LaunchError

_ASKED_ELSEWHERE = frozenset({"train_batch_size", "sequence_parallel_size"})
"""Keys of the top level that DeepSpeed reads only once a process group is there (runtime/config.py:468)."""

_NO_SUCH_BLOCK = {
    "load_balancing": "write-ups show it, no DeepSpeed has it; leave it out: packed sequences of one length balance the ranks",
}


def check_config(config: Mapping[str, Any]) -> None:
    """LaunchError for a configuration that the installed DeepSpeed would not take or would silently pass over."""
    found = problem(config)
    if found is not None:
        raise LaunchError(f"the DeepSpeed configuration: {found}")


def problem(config: Mapping[str, Any]) -> str | None:
    """What is wrong with a configuration, as one line that begins with the key; None for nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # narrates which device it found
        import deepspeed
        from deepspeed.runtime.config import DeepSpeedConfig
        from pydantic import ValidationError
    if (path := _automatic(config)) is not None:
        return f"{path} = 'auto': DeepSpeed drops it without a word and takes its own default; write the value"
    watched = _Watched({key: value for key, value in config.items() if key not in _ASKED_ELSEWHERE})
    try:
        DeepSpeedConfig(watched)
    except ValidationError as error:
        return _by_model(error.errors()[0], config, deepspeed.__version__)
    except Exception as error:  # assertions, ValueError, its own DeepSpeedConfigError: by block
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"DeepSpeed {deepspeed.__version__} refuses it: {lines[0]}"
    for path, names in watched.passed_over():
        return _unknown(path, names, f"{deepspeed.__version__}, which would pass over it")
    return None


class _Watched(dict[str, Any]):
    """A dictionary that remembers which of its keys were asked for; blocks inside it too."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        super().__init__({k: _Watched(v) if isinstance(v, Mapping) else v for k, v in block.items()})
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # asked for membership, or unpacked whole into a model that checks for itself

    def items(self) -> Any:
        self.asked.update(super().keys())
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self.asked.update(super().keys())
        return super().__iter__()

    def __copy__(self) -> _Watched:
        return self

    def __deepcopy__(self, memory: object) -> _Watched:
        return self

    def passed_over(self, path: str = "") -> Iterator[tuple[str, set[str]]]:
        """Path of each key that nothing asked for, and the names that were asked for beside it."""
        for key, value in super().items():
            where = f"{path}{key}"
            if key not in self.asked:
                yield where, set(self.asked)
            elif isinstance(value, _Watched) and value.asked:
                yield from value.passed_over(f"{where}.")


def _automatic(block: Mapping[str, Any], path: str = "") -> str | None:
    """Path of the first "auto"; config_utils.py:56 takes such values out before its models see them."""
    for key, value in block.items():
        inside = _automatic(value, f"{path}{key}.") if isinstance(value, Mapping) else f"{path}{key}" if value == "auto" else None
        if inside is not None:
            return inside
    return None


def _by_model(error: Any, config: Mapping[str, Any], version: str) -> str:
    """One line for the first error of a pydantic model, whose location is known only from the model downwards."""
    location = [str(part) for part in error["loc"]]
    if not location:  # by a rule over several fields
        return f"DeepSpeed {version} refuses it: {error['msg'].removeprefix('Value error, ')}"
    path = _path_to(config, location) or ".".join(location)
    if error["type"] == "extra_forbidden":
        return _unknown(path, _field_names(), version)
    return f"{path} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]} (DeepSpeed {version}); correct the value"


def _unknown(path: str, names: Iterable[str], version: str) -> str:
    key = path.rpartition(".")[2]
    if key in _NO_SUCH_BLOCK:
        return f"{path}: unknown to DeepSpeed {version}; {_NO_SUCH_BLOCK[key]}"
    near = difflib.get_close_matches(key, sorted(set(names) - {key}), n=1, cutoff=0.6)
    return f"{path}: unknown to DeepSpeed {version}; " + (f"did you mean '{near[0]}'?" if near else "leave it out")


def _path_to(config: Mapping[str, Any], location: list[str]) -> str | None:
    """The path at which a location inside some block lies: the first block that has its keys in this order."""
    inner: Any = config
    for part in location:
        if not isinstance(inner, Mapping) or part not in inner:
            break
        inner = inner[part]
    else:
        return ".".join(location)
    for key, value in config.items():
        if isinstance(value, Mapping) and (path := _path_to(value, location)):
            return f"{key}.{path}"
    return None


def _field_names() -> set[str]:
    """Names and aliases of all fields of DeepSpeed's configuration models."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    names: set[str] = set()
    waiting = [DeepSpeedConfigModel]
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        for name, field in model.model_fields.items():
            names |= {name, field.alias or name}
    return names
