"""The smoke gate fails when it should, says which check, and leaves no verdict.

Wrong behaviour these catch: a gate that passes whatever happens; a wrong mask in the packed data or in the batch;
gradients that are not summed; a rank that repeats another's data; a gate run on a rung whose lower rung was proved for
something else.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.gates.faults import FAULTS
from tests.e2e.project import Project

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", sorted(name for name, fault in FAULTS.items() if fault.caught_by[0] == "smoke"))
def test_planted_fault_is_caught(copy: Project, tmp_path: Path, name: str) -> None:
    check = FAULTS[name].caught_by[1]
    done = copy.stage("smoke@local", env=copy.with_fault(name, tmp_path))
    assert done.returncode == 3, done.stderr[-1500:]
    assert done.stderr.splitlines()[-1].startswith(f"smoke: smoke@local failed at check {check}: value "), done.stderr[-1500:]
    assert not (copy.root / "models/gates/local/smoke.json").exists()


def test_wrong_labels_in_the_packed_set_are_caught(copy: Project) -> None:
    path = copy.root / "data/packed/train-00000.arrow"
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    shifted = [[*labels[1:], -100] for labels in table.column("labels").to_pylist()]
    wrong = table.set_column(1, table.schema.field(1), pa.array(shifted, pa.list_(pa.int32())))
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, wrong.schema) as writer:
        writer.write_table(wrong)
    done = copy.stage("smoke@local")
    assert done.returncode == 3
    assert "failed at check loss_mask" in done.stderr


def test_a_verdict_of_another_run_below_is_refused(copy: Project) -> None:
    below = copy.root / "models/gates/ground/resume.json"
    below.write_text(json.dumps({"gate": "resume", "rung": "lower", "fingerprint": "0" * 64}), encoding="utf-8")
    done = copy.stage("smoke@local")
    assert done.returncode == 3
    assert "proves run 000000000000, this one is" in done.stderr
    assert "dvc repro resume@lower" in done.stderr
