"""Documents say what the code does, and lead somewhere.

Wrong behaviour these catch: a generated block that is out of date, missing or unknown; a link to a file or heading that is not
there; a command in the README that does not exist; a path of somebody's machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from docs import generate
from pipeline.cli import app
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
PLACES = {
    "stages": "README.md",
    "graph": "README.md",
    "verbs": "README.md",
    "params": "docs/params.md",
    "profile": "docs/profiles.md",
}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Headings as GitHub names them: lower case, punctuation gone, spaces to hyphens."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[tuple[str, str]]:
    """`make VERB` and `ladder VERB` inside code, whatever else is on the line."""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))
    return re.findall(r"(?:^|[\s`(])(make|ladder) ([a-z]\w*)", code, re.MULTILINE)


def test_generated_blocks_are_where_they_belong_and_current() -> None:
    assert set(PLACES) == set(generate.BLOCKS)
    for block, page in PLACES.items():
        assert f"<!-- generated: {block} -->" in (ROOT / page).read_text(encoding="utf-8")
    assert [path.name for path in generate.stale()] == []


def test_check_names_the_stale_file_and_writing_repairs_it(tmp_path: Path) -> None:
    for name in ("docs", "pipeline"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "docs.generate", *arguments]
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": ""}, capture_output=True, text=True, check=False)

    assert (ran("--check").returncode, ran("--check").stderr) == (0, "")
    edited = tmp_path / "docs/params.md"
    good = edited.read_text(encoding="utf-8")
    edited.write_text(good.replace("Peak learning rate", "Some rate"), encoding="utf-8")
    done = ran("--check")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["docs: docs/params.md: not what the code says; `make docs` writes it"]
    assert "Some rate" in edited.read_text(encoding="utf-8")
    assert ran().stdout.splitlines() == ["docs/params.md"]
    assert edited.read_text(encoding="utf-8") == good
    edited.write_text(good.replace("generated: params", "generated: parms"), encoding="utf-8")
    wrong = ran("--check")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("docs: docs/params.md: generated block 'parms': no such block; there are: stages,")


def test_the_graph_knows_dvc_edges() -> None:
    lines = generate.graph().splitlines()
    assert '    pack -->|"data/packed"| smoke_RUNG' in lines
    assert '    resume_RUNG -.->|"the next rung"| smoke_RUNG' in lines
    assert not [line for line in lines if line.startswith("    base -->") and line.endswith(" train")], "it follows from others"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), target
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_command_in_the_readme_exists() -> None:
    verbs = {
        "make": set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)),
        "ladder": set(typer.main.get_command(app).commands),  # pyright: ignore[reportAttributeAccessIssue]
    }
    named = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {("make", "repro"), ("make", "test"), ("ladder", "run"), ("ladder", "status")} <= set(named)
    assert [f"{tool} {verb}" for tool, verb in named if verb not in verbs[tool]] == []


def test_no_path_of_a_machine() -> None:
    texts = [*PAGES, *(p for p in (ROOT / "examples").rglob("*") if p.suffix in (".yaml", ".py"))]
    for page in texts:
        found = re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|var)/|\b[A-Z]:\\", page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(ROOT)}: {found[0] if found else ''}"
