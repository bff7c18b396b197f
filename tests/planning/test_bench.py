"""`ladder bench data`.

Would catch: figures that are not those of the stages, a reference whose failure or silence passes for a result, rows that
repeat and would be dropped as duplicates, memory of the first process alone, something written into the project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config.errors import ConfigError, DataError, ModelError, RunFailed
from pipeline.planning.bench import bench_data, generated_rows, table
from tests.workspace import Workspace, rows, write_rows

pytestmark = pytest.mark.unit

REFERENCE = """
import json, subprocess, sys
hold = "import time; held = b'x' * (150 << 20); time.sleep(1.5)"
for child in [subprocess.Popen([sys.executable, "-c", hold]) for _ in range(2)]:
    child.wait()
lines = sum(1 for _ in open(sys.argv[2]))
print("noise")
print(json.dumps({"tokens": lines * int(sys.argv[3]), "seconds": 50}))
"""


def test_figures_are_of_the_stages(made_base: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference.py").write_text(REFERENCE)
    command = f"{sys.executable} reference.py {{model}} {{rows}} {{max_length}}"
    found = bench_data(40, [], made_base.root / "models/base", 1024, command, rounds=1)
    assert (found.rows, found.max_length) == (40, 1024)
    assert [t.what for t in found.timings] == ["format", "pack", "format + pack", "reference"]
    ours, reference = found.timings[2:]
    assert ours.seconds == pytest.approx(sum(t.seconds for t in found.timings[:2]), abs=0.01)
    assert ours.tokens_per_second == pytest.approx(found.tokens / ours.seconds, rel=0.01)
    assert (reference.seconds, reference.tokens_per_second) == (50, 40 * 1024 // 50)
    assert found.ratio == pytest.approx(50 / ours.seconds, rel=0.01)
    assert all(0.01 < t.peak_gib < 4 for t in found.timings[:3])
    assert reference.peak_gib > 0.29, "two processes of 150 MiB stand in memory together"
    assert "40 rows" in table(found)
    assert f"{found.ratio:.1f} times as fast as the reference" in table(found)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reference.py"]


def test_the_verb_takes_files_and_prints_json(made_base: Workspace, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", rows(30))
    arguments = ["bench", "data", "--input", str(tmp_path / "a.jsonl"), "--model", str(made_base.root / "models/base"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["rows"], found["ratio"], found["max_length"]) == (30, None, 2048)
    assert [t["what"] for t in found["timings"]] == ["format", "pack", "format + pack"]


def test_rows_are_distinct_mixed_and_repeatable() -> None:
    made = list(generated_rows(300))
    assert made == list(generated_rows(300))
    assert len({r["prompt"] for r in made}) == 300
    assert all(r["prompt"] and r["completion"] for r in made)
    chinese = sum("。" in r["prompt"] + r["completion"] for r in made)
    assert 80 < chinese < 160


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("no tokenizer", ModelError, r"no tokenizer\.json.*--model.*dvc repro base"),
        ("no input", DataError, "no such file; --input names files of rows"),
        ("two inputs", ConfigError, "takes one file of rows, --input names 2"),
        ("bad rows", RunFailed, "stages.format.* ended with 2: format: "),
        ("failing reference", RunFailed, "ended with 3: no output"),
        ("silent reference", RunFailed, "its last line is no JSON with tokens and seconds"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str, made_base: Workspace, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_rows(good, rows(12))
    bad.write_text("nothing\n")
    model = tmp_path if case == "no tokenizer" else made_base.root / "models/base"
    inputs = {"no input": [tmp_path / "none"], "two inputs": [good, good], "bad rows": [bad]}.get(case, [good])
    ending = {"failing reference": "exit(3)", "silent reference": "print('done')"}.get(case)
    reference = f'{sys.executable} -c "{ending}"' if ending else "true" if case == "two inputs" else None
    with pytest.raises(error, match=message):
        bench_data(5, inputs, model, 128, reference, rounds=1)
