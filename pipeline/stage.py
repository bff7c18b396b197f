"""The stage contract: one typed function is the whole declaration of a stage.

    def pack(pack: PackParams, *, formatted: Path, model: Path, packed: Path) -> PackMetrics: ...

    if __name__ == "__main__":
        run_stage(pack)

`run_stage` reads params.yaml, checks the whole file, and hands over only the sections the function names, so nothing
untracked can be read. Each keyword-only `Path` becomes a flag. The returned dataclass is
written to `--metrics`, last and at once. An error of `config/errors.py` is one line on stderr and its exit code.

Command: `python -m stages.WORD --FLAG PATH ... --metrics FILE`, from the repository root.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.errors import ConfigError, LadderError
from pipeline.config.schema import load_params
from pipeline.launch.process import die_with_parent

PARAMS_FILE = Path("params.yaml")


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a stage function declares: its sections and its paths, by name."""

    sections: tuple[str, ...]
    paths: tuple[str, ...]


def signature_of(stage: Callable[..., Any]) -> Signature:
    """Read a stage function's declaration; TypeError for one that breaks the contract."""
    hints = typing.get_type_hints(stage)
    sections: list[str] = []
    paths: list[str] = []
    for name, parameter in inspect.signature(stage).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and hints[name] is Path:
            paths.append(name)
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and hints[name] is not Path:
            sections.append(name)
        else:
            raise TypeError(f"{stage.__name__}({name}): sections come first by position, paths are keyword-only `Path`")
    if not dataclasses.is_dataclass(hints.get("return")):
        raise TypeError(f"{stage.__name__}: returns its metrics as a dataclass")
    return Signature(tuple(sections), tuple(paths))


def run_stage(stage: Callable[..., Any]) -> None:
    """Run a stage function from the command line and exit."""
    die_with_parent()  # DVC ended by TERM or KILL would leave the command behind
    try:
        _run(stage, sys.argv[1:])
    except LadderError as error:
        print(f"{stage.__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"{stage.__name__}: interrupted", file=sys.stderr)
        sys.exit(130)


def _run(stage: Callable[..., Any], arguments: list[str]) -> None:
    from pipeline.artifact import write_json

    signature = signature_of(stage)
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage.__name__}", description=stage.__doc__, allow_abbrev=False)
    for name in (*signature.paths, "metrics"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="PATH")
    flags = vars(parser.parse_args(arguments))
    metrics: Path = flags.pop("metrics")
    absolute = [str(p) for p in (*flags.values(), metrics) if p.is_absolute()]
    if absolute:
        raise ConfigError(f"{absolute[0]}: an absolute path; dvc.yaml names paths relative to the repository")
    params = load_params(PARAMS_FILE)
    result = stage(*(getattr(params, name) for name in signature.sections), **flags)
    write_json(metrics, dataclasses.asdict(result))
