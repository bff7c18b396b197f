"""The loss curve of a run as a file: one JSON line per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CURVE = "curve.jsonl"


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's curve; a last line cut by a kill is dropped."""
    path = run / CURVE
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
