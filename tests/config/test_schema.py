"""YAML files against the schema.

Would catch: an error that spans lines, hides its file, key, value or rule, or names a wrong neighbour; a value read
otherwise than DVC reads it; a crash on a file that is no YAML; a published JSON schema that is out of date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.config.errors import ConfigError
from pipeline.config.schema import PUBLISHED, json_schema, load_params, load_profile
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

SHIPPED = (ROOT / "params.yaml").read_text(encoding="utf-8")
PATH_BASE = "base:\n  kind: path\n  path: m\n  content: abc\n  new_tokens: []\n"
HUB_BASE = "base:\n  kind: hub\n  id: owner/name\n  revision: main\n  new_tokens: []\n"


def _line(section: str, key: str, replacement: str) -> str:
    """The shipped file with one line of a section replaced, whatever value it holds."""
    start = SHIPPED.index(f"\n{section}:\n")
    changed, count = re.subn(rf"^ +{key}:.*\n", replacement, SHIPPED[start:], count=1, flags=re.MULTILINE)
    assert count == 1
    return SHIPPED[:start] + changed


def _value(section: str, key: str, written: str) -> str:
    return _line(section, key, f"  {key}: {written}\n")


def _tuning(written: str) -> str:
    return _line("train", "tuning", f"  tuning: {written}\n").replace("    kind: full\n", "")


def _section(section: str, text: str) -> str:
    """The shipped file with a whole section replaced."""
    changed, count = re.subn(rf"^{section}:\n(?: +.*\n)+", text, SHIPPED, count=1, flags=re.MULTILINE)
    assert count == 1
    return changed


def _message(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_params(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


CASES = {
    "unknown key": (
        _line("train", "learning_rate", "  learning_rte: 0.003\n"),
        [": train.learning_rte = 0.003: unknown key", "did you mean 'learning_rate'?", "(and 1 more)"],
    ),
    "unknown key, nothing near": (_value("smoke", "samples", "9\n  zzz: 1"), ["smoke.zzz = 1", "valid here: samples, epochs"]),
    "unknown section": (SHIPPED + "\ntrian: {}\n", [": trian = {}: unknown key; did you mean 'train'?"]),
    "unknown key in a branch": (
        _tuning("{kind: lora, rank: 4, alpha: 8, dropout: 0.0, target_module: [q_proj]}"),
        ["train.tuning.target_module", "did you mean 'target_modules'?"],
    ),
    "unknown key of another branch": (
        _tuning("{kind: full, rank: 4}"),
        ["train.tuning.rank = 4: unknown key", "valid here: kind"],
    ),
    "unknown key of the base": (_line("base", "hidden_size", "  hiden_size: 9\n"), ["base.hiden_size = 9", "'hidden_size'"]),
    "text for a number": (_value("pack", "max_length", "'160'"), [': pack.max_length = "160": ', "integer"]),
    "fraction for a whole": (_value("format", "split_seed", "7.5"), ["format.split_seed = 7.5", "integer"]),
    "truth value for a number": (_value("smoke", "epochs", "true"), ["smoke.epochs = true", "integer"]),
    "text for a list": (_value("base", "corpus", "a.jsonl"), ['base.corpus = "a.jsonl"', "array"]),
    "wrong item of a list": (_value("base", "corpus", "[3]"), ["base.corpus.0 = 3", "string"]),
    "unknown key of a list's item": (
        SHIPPED.replace("      weight: 1.0", "      wight: 1.0"),
        ["format.sources.0.wight = 1.0", "did you mean 'weight'?"],
    ),
    "unknown column": (
        SHIPPED.replace("columns: {}", "columns: {instructon: q}"),
        ["format.sources.0.columns.instructon", "did you mean 'instruction'?"],
    ),
    "unknown key of an optional section": (
        SHIPPED.replace("near_duplicates: null", "near_duplicates: {thresold: 0.8}"),
        ["format.near_duplicates.thresold = 0.8", "did you mean 'threshold'?"],
    ),
    "own template not given": (_value("format", "template", "own"), ["format: template is 'own'", "own_template is null"]),
    "own template not used": (_value("format", "own_template", "x"), ["format: template is 'chat'", "own_template is given"]),
    "empty list": (_value("base", "corpus", "[]"), ["base.corpus = []", "at least 1"]),
    "missing": (_line("pack", "max_length", ""), [": pack.max_length: missing", "no defaults"]),
    "missing section": (_section("evaluate", ""), [": evaluate: missing"]),
    "empty section": (_section("evaluate", "evaluate:\n"), ["evaluate = null"]),
    "wrong word": (
        _value("pack", "long_documents", "truncat"),
        ['pack.long_documents = "truncat"', "'truncate'", "did you mean 'truncate'?"],
    ),
    "wrong union kind": (_value("base", "kind", "scrach"), ['base.kind = "scrach"', "'hub'", "did you mean 'scratch'?"]),
    "no union kind": (_tuning("{rank: 4}"), ["train.tuning", "kind"]),
    "scalar for a union": (_section("base", "base: 3\n"), ["base = 3"]),
    "below the range": (_value("pack", "max_length", "4"), ["pack.max_length = 4", "greater than or equal to 8"]),
    "above the range": (_value("format", "max_reject_share", "1.0"), ["format.max_reject_share = 1.0", "less than 1"]),
    "negative rate": (_value("train", "learning_rate", "-1"), ["train.learning_rate = -1", "greater than 0"]),
    "impossible combination": (
        _value("base", "hidden_size", "130"),
        [": base: hidden_size 130", "must be a multiple of 2 x num_attention_heads"],
    ),
    "impossible kill": (_value("resume", "kill_after", "900"), [": resume: kill_after 900", "must lie between 1 and steps - 2"]),
    "broken ladder": (
        _section("ladder", "ladder:\n  rungs:\n    local: node8\n"),
        [": ladder: rung 'local'", "'ground'", "'node8'"],
    ),
    "branch of the hub": (_section("base", HUB_BASE), ['base.revision = "main"', "40"]),
    "short hash": (_section("base", PATH_BASE), ['base.content = "abc"', "64"]),
    "date": (_value("format", "split_seed", "2026-01-31"), ["format.split_seed = 2026-01-31", "date", "quoted"]),
    "infinity": (_value("train", "learning_rate", ".inf"), ["train.learning_rate = inf", "finite"]),
    "not a number": (_value("train", "learning_rate", ".nan"), ["train.learning_rate = nan", "finite"]),
    "binary": (_value("base", "corpus", "[!!binary aGk=]"), ["base.corpus.0 = b'hi'"]),
    "alias of itself": (_value("base", "corpus", "&x [*x]"), ["base.corpus.0 = itself"]),
    "field named as its branch": (
        _section("base", PATH_BASE.replace("path: m", "path: 3").replace("abc", "a" * 64)),
        [": base.path = 3"],
    ),
    "long value": (_value("format", "split_seed", "x" * 500), ["format.split_seed", "xxx...: ", "integer"]),
    "value of many lines": (_value("format", "split_seed", "|\n    a\n    b"), ['format.split_seed = "a\\nb\\n"']),
    "key that is a number": (_value("format", "split_seed", "7\n  1: 2"), ["format.1 = 2: unknown key"]),
}


@pytest.mark.parametrize(("text", "needed"), CASES.values(), ids=CASES)
def test_one_line_says_what_is_wrong(text: str, needed: list[str], tmp_path: Path) -> None:
    message = _message(tmp_path / "params.yaml", text)
    assert [n for n in needed if n not in message] == [], message
    assert len(message) < 400


def test_further_problems_are_counted(tmp_path: Path) -> None:
    message = _message(tmp_path / "params.yaml", _section("pack", "pack:\n  max_length: x\n  long_documents: y\n"))
    assert message.endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (_value("pack", "max_length", "[160"), ["not valid YAML"]),
        (_line("pack", "max_length", "\tmax_length: 160\n"), ["not valid YAML"]),
        (_value("pack", "max_length", "9\n  max_length: 8"), ["max_length"]),
        (_value("pack", "max_length", "*none"), ["none"]),
        ("", ["NoneType", "mapping"]),
        ("- 1\n", ["list", "mapping"]),
        ("a: \x01\n", ["not valid YAML"]),
    ],
    ids=["bracket", "tab", "twice", "alias", "empty", "list", "control character"],
)
def test_what_is_no_yaml_names_its_line(text: str, needed: list[str], tmp_path: Path) -> None:
    message = _message(tmp_path / "params.yaml", text)
    assert [n for n in needed if n not in message] == [], message


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"ladder: \xff\n")
    with pytest.raises(ConfigError, match=r"params\.yaml: byte 8 is not UTF-8"):
        load_params(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml: no such file"):
        load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize(("written", "value"), [("1e-5", 1e-5), ("3", 3.0), ("3.0E-4", 3e-4), ("0.1", 0.1)])
def test_numbers_are_read_as_dvc_reads_them(written: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(_value("train", "learning_rate", written), encoding="utf-8")
    assert load_params(path).train.learning_rate == value
    from dvc.utils.serialize import load_yaml

    assert load_yaml(str(path))["train"]["learning_rate"] == value


@pytest.mark.parametrize("word", ["yes", "no", "on", "off"])
def test_words_are_no_truth_values(word: str, tmp_path: Path) -> None:
    path = tmp_path / "local.yaml"
    text = (ROOT / "profiles/local.yaml").read_text(encoding="utf-8")
    profile: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    lines = [f"profile_flops: {word}" if k == "profile_flops" else f"{k}: {json.dumps(v)}" for k, v in profile.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=f'profile_flops = "{word}"'):
        load_profile(path)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("ranks", 0, ["ranks = 0", "greater than 0"]),
        ("ranks", "atuo", ["ranks", "atuo"]),
        ("zero", 4, ["zero = 4", "0, 1, 2 or 3"]),
        ("device", "gpu", ['device = "gpu"', "'cuda'"]),
        ("learning_rate", 0.1, ["learning_rate = 0.1: unknown key"]),
        ("environment", {"NCCL_DEBUG": 1}, ["environment.NCCL_DEBUG = 1", "string"]),
    ],
)
def test_profiles_are_checked_alike(key: str, value: object, needed: list[str], tmp_path: Path) -> None:
    profile: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "profiles/local.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "local.yaml"
    path.write_text(json.dumps({**profile, key: value}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "\n" not in message
    assert [n for n in needed if n not in message] == [], message


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schema_is_the_code_s(name: str) -> None:
    published = (ROOT / "docs/schema" / name).read_text(encoding="utf-8")
    assert published == json_schema(PUBLISHED[name]), f"docs/schema/{name} is out of date: run `ladder schema`"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schema_completes_for_editors(name: str) -> None:
    schema = json.loads(json_schema(PUBLISHED[name]))
    sections = {title: part for title, part in schema.get("$defs", {}).items() if part}  # `{}` is any JSON value
    for title, part in {"": schema, **sections}.items():
        assert part["additionalProperties"] is False, title
        assert sorted(part["required"]) == sorted(part["properties"]), title
        assert not [key for key, value in part["properties"].items() if "default" in value]


def test_params_points_editors_to_its_schema() -> None:
    first = SHIPPED.splitlines()[0]
    assert first == "# yaml-language-server: $schema=docs/schema/params.schema.json"
    assert "params.schema.json" in PUBLISHED
