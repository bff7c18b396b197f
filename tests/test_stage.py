"""The stage contract.

Would catch: a declaration that is misread, an untracked section within reach of a stage, a traceback where one line was
promised, a wrong exit code, metrics that stand although the stage failed, a command that outlives the one who ran it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.params import PackParams, TrainParams
from pipeline.stage import Signature, signature_of
from tests.workspace import ROOT

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Metrics:
    rows: int


def test_signature_is_sections_then_paths() -> None:
    def work(pack: PackParams, train: TrainParams, *, source: Path, target: Path) -> Metrics:
        raise NotImplementedError

    assert signature_of(work) == Signature(("pack", "train"), ("source", "target"))


def _path_by_position(source: Path) -> Metrics:
    raise NotImplementedError


def _section_by_name(*, pack: PackParams) -> Metrics:
    raise NotImplementedError


def _any_number(*paths: Path) -> Metrics:
    raise NotImplementedError


def _text_path(*, source: str) -> Metrics:
    raise NotImplementedError


def _no_metrics(pack: PackParams) -> None:
    raise NotImplementedError


def _mapping(pack: PackParams) -> dict[str, int]:
    raise NotImplementedError


@pytest.mark.parametrize("stage", [_path_by_position, _section_by_name, _any_number, _text_path, _no_metrics, _mapping])
def test_a_function_outside_of_the_contract(stage: Any) -> None:
    with pytest.raises(TypeError, match=stage.__name__):
        signature_of(stage)


TOY = """
    import os, sys
    from dataclasses import dataclass
    from pathlib import Path
    from pipeline.config.errors import *
    from pipeline.config.params import PackParams
    from pipeline.stage import run_stage

    @dataclass(frozen=True)
    class ToyMetrics:
        max_length: int
        seen: str

    def toy(pack: PackParams, *, source: Path) -> ToyMetrics:
        before = Path("metrics/toy.json").exists()
        BODY
        return ToyMetrics(pack.max_length, f"{source} {type(pack).__name__} {before}")

    if __name__ == "__main__":
        run_stage(toy)
"""


@dataclass(frozen=True)
class Toy:
    root: Path

    def run(self, body: str, *flags: str) -> subprocess.CompletedProcess[str]:
        (self.root / "toy.py").write_text(textwrap.dedent(TOY).replace("BODY", body))
        flags = flags or ("--source", "data/x", "--metrics", "metrics/toy.json")
        return subprocess.run(
            [sys.executable, "-m", "toy", *flags],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    def metrics(self) -> dict[str, Any] | None:
        path = self.root / "metrics/toy.json"
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return Toy(tmp_path)


def test_metrics_are_written_last(toy: Toy) -> None:
    ended = toy.run("pass")
    assert (ended.returncode, ended.stderr) == (0, "")
    metrics = toy.metrics()
    assert metrics is not None
    assert metrics["seen"] == "data/x PackParams False"
    assert list((toy.root / "metrics").iterdir()) == [toy.root / "metrics/toy.json"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise ConfigError('a value')", 2),
        ("raise DataError('a value')", 2),
        ("raise ModelError('a value')", 2),
        ("raise LaunchError('a value')", 2),
        ("raise GateFailed('a value')", 3),
        ("raise RunFailed('a value')", 1),
        ("raise Resumable('a value')", 75),
    ],
)
def test_an_error_is_one_line_and_its_code(body: str, code: int, toy: Toy) -> None:
    (toy.root / "metrics").mkdir()
    (toy.root / "metrics/toy.json").write_text('{"earlier": true}')
    ended = toy.run(body)
    assert (ended.returncode, ended.stderr, ended.stdout) == (code, "toy: a value\n", "")
    assert toy.metrics() == {"earlier": True}


def test_a_defect_keeps_its_traceback(toy: Toy) -> None:
    """An error of ours is no error of the user's: it must not be hidden."""
    ended = toy.run("assert before, 'a defect'")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "a defect" in ended.stderr
    assert toy.metrics() is None


def test_interrupt(toy: Toy) -> None:
    ended = toy.run("raise KeyboardInterrupt")
    assert (ended.returncode, ended.stderr) == (130, "toy: interrupted\n")


@pytest.mark.parametrize("flag", ["source", "metrics"])
def test_absolute_paths_are_refused(flag: str, toy: Toy) -> None:
    flags = {"source": "data/x", "metrics": "metrics/toy.json"} | {flag: str(toy.root / "there")}
    ended = toy.run("pass", *(word for name, value in flags.items() for word in (f"--{name}", value)))
    assert ended.returncode == 2
    assert ended.stderr == f"toy: {toy.root / 'there'}: an absolute path; dvc.yaml names paths relative to the repository\n"
    assert not (toy.root / "there").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--metrics", "metrics/toy.json"),
        ("--source", "data/x"),
        ("--source", "data/x", "--metrics", "m.json", "--other", "y"),
        ("--sour", "data/x", "--metrics", "m.json"),
        ("--source", "data/x", "--metrics", "m.json", "--pack", "y"),
    ],
)
def test_flags_are_exactly_the_paths(flags: tuple[str, ...], toy: Toy) -> None:
    ended = toy.run("pass", *flags)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_the_whole_file_is_checked_whatever_the_stage_reads(toy: Toy) -> None:
    path = toy.root / "params.yaml"
    path.write_text(path.read_text().replace("  learning_rate:", "  learning_rte:"))
    ended = toy.run("pass")
    assert ended.returncode == 2
    assert ended.stderr.startswith("toy: params.yaml: train.learning_rte")
    assert ended.stderr.count("\n") == 1


def test_no_params_file(toy: Toy) -> None:
    (toy.root / "params.yaml").unlink()
    ended = toy.run("pass")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "params.yaml: no such file" in ended.stderr


def test_only_named_sections_are_handed_over(toy: Toy) -> None:
    ended = toy.run("assert not hasattr(pack, 'learning_rate') and set(type(pack).model_fields) == set(PackParams.model_fields)")
    assert ended.returncode == 0, ended.stderr


def test_a_stage_ends_with_the_command_that_runs_it(toy: Toy) -> None:
    """DVC starts a stage through a shell; ended by KILL, it can end nothing itself."""
    toy.run("pass")
    body = "import time; Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    (toy.root / "toy.py").write_text(textwrap.dedent(TOY).replace("BODY", body))
    code = (
        "import subprocess, sys, pathlib, time, os, signal\n"
        "subprocess.Popen([sys.executable, '-m', 'toy', '--source', 'x', '--metrics', 'm.json'])\n"
        "while not (pathlib.Path('pid').exists() and pathlib.Path('pid').read_text()): time.sleep(0.02)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=toy.root, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    pid = int((toy.root / "pid").read_text())
    assert ended_within(pid, 20)


def ended_within(pid: int, seconds: float) -> bool:
    """Whether a process that is not ours is gone, or a zombie, in time."""
    import time

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
