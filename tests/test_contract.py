"""dvc.yaml against the stages' signatures, imports and params: one word, five places, and nothing untracked.

Wrong behaviour these catch: a flag, section or path that only one side knows; code a stage runs that no dependency covers; a
parameter whose change re-runs too much or too little; a model that depends on orchestration or docs.
"""

from __future__ import annotations

import copy
import importlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.config.params import Params
from pipeline.fingerprint import ROOT, closure, is_plumbing
from pipeline.stage import Signature, signature_of

pytestmark = pytest.mark.unit

NOT_TRACKED = {
    ("smoke", "scratch"): "a gate's run folder: kept for reading after a failure, never an input",
    ("resume", "scratch"): "as above",
    ("train", "runs"): "checkpoints outside of DVC, which would delete them before a run",
    ("train", "profiles"): "where training runs must not change what it gives; the gates depend on it",
    ("export", "runs"): "the shards that models/checkpoint.json, a dependency, describes by hash",
}
"""Paths of stages that are neither dependency nor output, each with its reason."""


def load(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


STAGES: dict[str, Any] = {name: body.get("do", body) for name, body in load(ROOT / "dvc.yaml")["stages"].items()}


def names(entries: list[Any]) -> list[str]:
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


def outputs(stage: dict[str, Any]) -> list[str]:
    return names(stage["outs"]) + names(stage["metrics"]) + names(stage.get("plots", []))


def flags(stage: dict[str, Any]) -> dict[str, str]:
    words = shlex.split(stage["cmd"])[3:]
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}


def declared(word: str) -> Signature:
    return signature_of(getattr(importlib.import_module(f"stages.{word}"), word))


@pytest.mark.parametrize("word", STAGES)
def test_command_flags_and_sections_are_the_signature(word: str) -> None:
    stage, signature = STAGES[word], declared(word)
    assert shlex.split(stage["cmd"])[:3] == ["python", "-m", f"stages.{word}"]
    assert set(flags(stage)) == {*signature.paths, "metrics"}
    assert list(stage["params"]) == sorted(signature.sections)


@pytest.mark.parametrize("word", STAGES)
def test_every_path_is_a_dependency_or_an_output(word: str) -> None:
    stage = STAGES[word]
    tracked = {*names(stage["deps"]), *outputs(stage)}
    for flag, value in flags(stage).items():
        assert (value in tracked) != ((word, flag) in NOT_TRACKED), f"--{flag} {value}"
    passed = set(flags(stage).values())
    code = {d for d in stage["deps"] if (ROOT / d).exists() and d.split("/")[0] in ("stages", "pipeline")}
    assert set(stage["deps"]) - code <= passed, "a dependency on data that the stage is not given"
    assert set(outputs(stage)) <= passed, "an output that the stage is not given"


@pytest.mark.parametrize("word", STAGES)
def test_dependencies_cover_the_imported_code_and_nothing_else(word: str) -> None:
    needed = [p for p in closure(f"stages.{word}") if not is_plumbing(p)]
    code = [Path(d) for d in STAGES[word]["deps"] if d.split("/")[0] in ("stages", "pipeline")]
    uncovered = [str(p) for p in needed if not any(p == c or c in p.parents for c in code)]
    assert uncovered == []
    idle = [str(c) for c in code if c.suffix == ".py" and c not in needed]
    assert idle == []
    assert not any("orchestration" in str(p) or "reporting" in str(p) or str(p).startswith("docs") for p in needed)


def test_one_word_five_places() -> None:
    sections = set(Params.model_fields) - {"ladder"}
    assert set(STAGES) == sections
    assert {p.stem for p in (ROOT / "stages").glob("*.py")} - {"__init__"} == sections
    assert set(load(ROOT / "params.yaml")) == {*sections, "ladder"}
    assert {p.stem.removeprefix("test_") for p in (ROOT / "tests/stages").glob("test_*.py")} == sections
    for word, stage in STAGES.items():
        assert names(stage["metrics"])[0].startswith(f"metrics/{word}")


def test_run_cache_is_on_for_every_stage() -> None:
    """DVC restores earlier results only for stages whose plain outs are all cached."""
    for word, stage in STAGES.items():
        assert [out for out in stage["outs"] if isinstance(out, dict)] == [], word


def test_only_orchestration_knows_dvc_and_prefect() -> None:
    for path in (ROOT / "pipeline").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for library, owner in (("dvc", "dag.py"), ("prefect", "flow.py")):
            if f"import {library}" in text or f"from {library}" in text:
                assert (path.parent.name, path.name) == ("orchestration", owner)


def test_data_room_imports_neither_torch_nor_transformers() -> None:
    files = (p.relative_to(ROOT).with_suffix("") for p in (ROOT / "pipeline/dataset").rglob("*.py") if p.stem != "__init__")
    modules = [".".join(path.parts) for path in files]
    modules += [
        "pipeline.training.run",
        "pipeline.training.checkpoint",
        "pipeline.gates.smoke_checks",
        "stages.train",
        "stages.pack",
    ]
    script = (
        f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Every key of params.yaml, and the stages its change makes stale.


def leaves(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*prefix, key))]
    return [prefix]


def changed(params: dict[str, Any], leaf: tuple[str, ...]) -> dict[str, Any]:
    edited = copy.deepcopy(params)
    here = edited
    for key in leaf[:-1]:
        here = here[key]
    old = here[leaf[-1]]
    here[leaf[-1]] = old + 1 if isinstance(old, int | float) else [*old, "more"] if isinstance(old, list) else f"{old}-other"
    return edited


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DVC project with this dvc.yaml in which everything is up to date; its commands only create their outputs."""
    root = tmp_path_factory.mktemp("walk")
    pipeline = load(ROOT / "dvc.yaml")
    pipeline.pop("plots")
    for body in pipeline["stages"].values():
        stage = body.get("do", body)
        stage["cmd"] = "touch " + " ".join(outputs(stage))
        stage["deps"] = [d for d in stage["deps"] if d.split("/")[0] not in ("stages", "pipeline")]
        for folder in {str(Path(p).parent) for p in outputs(stage)}:
            (root / folder).mkdir(parents=True, exist_ok=True)
    yaml = YAML()
    with (root / "dvc.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(pipeline, file)
    for name in ("params.yaml", "models/gates/ground/resume.json", "profiles/local.yaml", "data/raw/sample.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
    (root / "models/gates/local").mkdir(parents=True, exist_ok=True)
    for command in (
        ["git", "init", "-q"],
        [sys.executable, "-m", "dvc", "init", "-q"],
        [sys.executable, "-m", "dvc", "repro", "-q"],
    ):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return root


def test_each_parameter_makes_exactly_its_stages_stale(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(settled)
    path = settled / "params.yaml"
    params = load(path)
    yaml = YAML()
    with Repo(str(settled)) as repo:
        assert repo.status() == {}
    walked = [leaf for leaf in leaves(params) if leaf[0] != "ladder"]
    assert len(walked) > 40
    for leaf in walked:
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(changed(params, leaf), file)
        with Repo(str(settled)) as repo:
            stale = {name.split("@")[0] for name in repo.status()}
        assert stale == {word for word in STAGES if leaf[0] in declared(word).sections}, leaf
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(params, file)


def test_a_second_rung_asks_for_its_own_proofs_and_for_training_on_top(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(settled)
    text = (settled / "params.yaml").read_text(encoding="utf-8")
    params = load(settled / "params.yaml")
    params["ladder"]["rungs"]["bigger"] = "local"
    with (settled / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(params, file)
    (settled / "profiles/bigger.yaml").write_bytes((ROOT / "profiles/local.yaml").read_bytes())
    try:
        with Repo(str(settled)) as repo:
            stages = [stage.addressing for stage in repo.index.stages]
            stale = set(repo.status())
            below = {dep.def_path for stage in repo.index.stages if stage.addressing == "smoke@bigger" for dep in stage.deps}
    finally:
        (settled / "params.yaml").write_text(text, encoding="utf-8")
    assert {"smoke@bigger", "resume@bigger"} <= set(stages)
    assert stale == {"smoke@bigger", "resume@bigger", "train"}
    assert "models/gates/local/resume.json" in below
