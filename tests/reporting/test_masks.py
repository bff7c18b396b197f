"""`ladder masks`: packed data decoded, in the terminal and as a page.

Would catch: context shown as trained on, documents that run together, shares that are off, text that a browser or a terminal
would obey, a page that needs the network.
"""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config.errors import ConfigError, DataError
from pipeline.reporting import masks
from tests.workspace import ROOT, Workspace, make_workspace, rows

pytestmark = pytest.mark.unit

pa: Any = pyarrow
ANSWER = '<script>alert(1)</script> \x1b[31m 答え 🙂 & "x"'


@pytest.fixture(scope="module")
def packed(made_base: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = make_workspace(
        tmp_path_factory.mktemp("masks") / "project", [*rows(40), {"instruction": "<b>bold</b> </pre>", "output": ANSWER}]
    )
    (workspace.root / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (workspace.root / "models").symlink_to(made_base.root / "models")
    assert workspace.run("format").code == 0
    assert workspace.run("pack").code == 0
    return workspace


def _report(packed: Workspace, monkeypatch: pytest.MonkeyPatch, samples: int = 1000) -> masks.Report:
    monkeypatch.chdir(packed.root)
    return masks.read(masks.paths_of(Path("dvc.yaml")), "train", samples)


def _parts(packed: Workspace) -> dict[str, list[str]]:
    with pa.memory_map(str(packed.root / "data/formatted/train.arrow")) as file:
        return {row["place"]: row["parts"] for row in pa.ipc.open_stream(file).read_all().to_pylist()}


def test_pieces_are_the_parts(packed: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(packed, monkeypatch)
    wanted = _parts(packed)
    documents = [document for sequence in report.samples for document in sequence.documents]
    assert len(documents) == report.documents == len(wanted) > 20
    for document in documents:
        assert [piece.text for piece in document.pieces] == wanted[document.place]
        assert [piece.supervised for piece in document.pieces] == [False, True]


def test_figures_are_those_of_pack(packed: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(packed, monkeypatch, 2)
    assert len(report.samples) == 2
    assert report.tokens == packed.manifest("data/packed")["train_tokens"]
    assert report.sequences == packed.manifest("data/packed")["train_sequences"]
    every = _report(packed, monkeypatch)
    documents = [document for sequence in every.samples for document in sequence.documents]
    assert report.supervised == sum(document.supervised for document in documents)
    assert report.tokens == sum(document.tokens for document in documents)
    assert sum(report.bars) == len(documents)
    for tenth, count in enumerate(report.bars):
        assert count == sum(tenth / 10 <= d.share < (tenth + 1) / 10 for d in documents)
    assert [d.share for d in report.least] == sorted(d.share for d in documents)[: len(report.least)]
    assert len(report.least) == masks.LEAST


def test_terminal_view(packed: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    report = _report(packed, monkeypatch)
    masks.show(report, Console(file=file, force_terminal=True, color_system="standard", width=200, soft_wrap=True))
    text = file.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain.count("--- rows.jsonl:") == report.documents
    bright = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text, re.DOTALL))
    dim = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", text, re.DOTALL))
    assert bright.count("<|end|>") == report.documents
    assert "<|user|>" in dim
    assert "<|user|>" not in bright
    assert "␛[31m" in bright
    assert "\x1b[31m" not in text


def test_page(packed: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(packed, monkeypatch)
    text = masks.page(report)
    assert "<script" not in text
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link|src=", text)
    marked = [html.unescape(m) for m in re.findall(r"<mark>(.*?)</mark>", text, re.DOTALL)]
    answers = {parts[1] for parts in _parts(packed).values()}
    assert set(marked[1:]) == answers
    assert f"{ANSWER}<|end|>" in answers
    assert "prefers-color-scheme: dark" in text


def test_verb(packed: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packed.root)
    runner = CliRunner()
    shown = runner.invoke(app, ["masks", "1"])
    assert shown.exit_code == 0
    assert shown.stdout.count("sequence ") == 1
    written = runner.invoke(app, ["masks", "--html", "out/masks.html", "--split", "validation"])
    assert written.exit_code == 0
    assert "Loss masks of the validation split" in Path("out/masks.html").read_text(encoding="utf-8")
    assert isinstance(runner.invoke(app, ["masks", "--split", "test"]).exception, ConfigError)
    assert runner.invoke(app, ["masks", "0"]).exit_code == 2


def test_refusals(packed: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root of the repository"):
        masks.paths_of(tmp_path / "dvc.yaml")
    monkeypatch.chdir(packed.root)
    paths = masks.paths_of(Path("dvc.yaml"))
    with pytest.raises(DataError, match="dvc repro"):
        masks.read(masks.Paths(paths.formatted, paths.model, tmp_path), "train", 1)
    with pytest.raises(DataError, match="the other set is missing; `dvc repro`"):
        masks.read(masks.Paths(tmp_path / "other", paths.model, paths.packed), "train", 1)
    other = Path(shutil.copytree(paths.formatted, tmp_path / "other"))
    (other / "train.arrow").unlink()
    with pytest.raises(DataError, match="dvc repro format"):
        masks.read(masks.Paths(other, paths.model, paths.packed), "train", 1)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "parts_digest": "0" * 64}))
    with pytest.raises(DataError, match=r"made from another formatted set.*dvc repro pack"):
        masks.read(masks.Paths(other, paths.model, paths.packed), "train", 1)


def test_imports_neither_torch_nor_transformers() -> None:
    script = "import sys, pipeline.reporting.masks; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
