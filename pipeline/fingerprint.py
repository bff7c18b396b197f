"""Code as part of a run's identity: the files a module is made of.

Contract: `closure` follows `import` statements and constants that name a module (a rank's entry point is
started by name) from one module through this repository; libraries and packages' `__init__` files
are outside. The result does not depend on the machine: relative paths and contents only.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.artifact import canonical, digest_text

ROOT = Path(__file__).resolve().parent.parent
"""The checkout this code runs from."""

_MODULE_NAME = re.compile(r"^(pipeline|stages)(\.\w+)+$")


def closure(module: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Relative paths of the files `module` needs from this repository, itself included, sorted."""
    seen: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop(), root)
        if path is None or path in seen:
            continue
        seen.add(path)
        waiting.extend(_named_modules(root / path))
    return tuple(sorted(seen))


@cache
def code_digest(module: str) -> str:
    """SHA-256 over the contents of a module's closure, the plumbing (`PLUMBING`) left out."""
    files = [p for p in closure(module) if not is_plumbing(p)]
    return digest_text(canonical({p.as_posix(): hashlib.sha256((ROOT / p).read_bytes()).hexdigest() for p in files}))


PLUMBING = (
    "pipeline/artifact.py",
    "pipeline/config",
    "pipeline/environment.py",
    "pipeline/fingerprint.py",
    "pipeline/launch",
    "pipeline/progress.py",
    "pipeline/stage.py",
)
"""What carries values and starts processes but decides none: no stage goes stale when it changes."""


def is_plumbing(path: Path) -> bool:
    return any(path.as_posix() == p or path.as_posix().startswith(p + "/") for p in PLUMBING)


def _file_of(module: str, root: Path) -> Path | None:
    path = Path(*module.split(".")).with_suffix(".py")
    return path if (root / path).is_file() else None


def _named_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE_NAME.match(node.value):
            yield node.value
