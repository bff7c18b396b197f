"""The evaluate stage's figures are those of the answers it leaves.

Wrong behaviour these catch: scores that do not follow from the answers; base and tuned swapped; rows that packing
dropped being scored.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.project import Project

pytestmark = pytest.mark.e2e


def test_scores_follow_from_the_answers(finished: Project) -> None:
    scores = json.loads((finished.root / "metrics/evaluate.json").read_text())
    lines = [json.loads(x) for x in (finished.root / "metrics/answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert scores["rows"] == len(lines) > 5
    for name in ("base", "tuned"):
        equal = sum(line[name].strip() == line["reference"] for line in lines) / len(lines)
        assert scores[name]["exact_match"] <= round(equal, 4), "an answer that did not stop is not right"
        assert 0 <= scores[name]["stop_rate"] <= 1
    assert scores["tuned"]["loss"] < scores["base"]["loss"]


def test_no_held_out_rows_is_one_clear_line(copy: Project) -> None:
    import pyarrow as pa

    path = copy.root / "data/packed/validation-00000.arrow"
    with pa.memory_map(str(path)) as file:
        schema = pa.ipc.open_stream(file).schema
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema):
        pass
    done = copy.stage("evaluate")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no held-out rows; raise format.validation_share" in line
