"""The resume gate fails when it should.

Wrong behaviour these catch: another data order after a resume; an exported head that is not the trained one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gates.faults import FAULTS
from tests.e2e.project import Project

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", sorted(name for name, fault in FAULTS.items() if fault.caught_by[0] == "resume"))
def test_planted_fault_is_caught(copy: Project, tmp_path: Path, name: str) -> None:
    check = FAULTS[name].caught_by[1]
    done = copy.stage("resume@local", env=copy.with_fault(name, tmp_path))
    assert done.returncode == 3, done.stderr[-1500:]
    assert done.stderr.splitlines()[-1].startswith(f"resume: resume@local failed at check {check}: value "), done.stderr[-1500:]
    assert not (copy.root / "models/gates/local/resume.json").exists()
