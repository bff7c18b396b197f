"""The schema of params.yaml and profiles.

Would catch: a field that got a default (DVC would not see its value), a section that can be changed after loading, a
field without a description for editors, the shipped files no longer fitting the schema, a ladder that skips a rung.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from pipeline.config import params as params_module
from pipeline.config import profile as profile_module
from pipeline.config.params import Ladder, Params, ResumeParams, ScratchBase, Section
from pipeline.config.profile import Profile
from pipeline.config.schema import load_params, load_profile
from tests.workspace import ROOT

pytestmark = pytest.mark.unit


def _section_classes() -> Iterator[type[Section]]:
    for module in (params_module, profile_module):
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Section)
                and value is not Section
                and value.__module__ == module.__name__
            ):
                yield value


CLASSES = sorted(set(_section_classes()), key=lambda c: c.__name__)


def test_every_part_of_the_schema_is_walked() -> None:
    assert {Params, Profile, ScratchBase} <= set(CLASSES)
    assert len(CLASSES) >= 16


@pytest.mark.parametrize("section", CLASSES, ids=lambda c: c.__name__)
def test_no_field_has_a_default(section: type[BaseModel]) -> None:
    assert [name for name, field in section.model_fields.items() if not field.is_required()] == []


@pytest.mark.parametrize("section", [c for c in CLASSES if c is not Params], ids=lambda c: c.__name__)
def test_every_field_is_described(section: type[BaseModel]) -> None:
    assert section.__doc__
    undescribed = [n for n, f in section.model_fields.items() if not (f.description or "").strip()]
    assert undescribed == []


@pytest.mark.parametrize("section", CLASSES, ids=lambda c: c.__name__)
def test_sections_are_closed_and_frozen(section: type[BaseModel]) -> None:
    assert section.model_config.get("extra") == "forbid"
    assert section.model_config.get("frozen") is True
    assert section.model_config.get("strict") is True


def test_a_loaded_value_cannot_be_changed() -> None:
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(ValidationError, match="frozen"):
        params.pack.max_length = 9  # pyright: ignore[reportAttributeAccessIssue]


def test_shipped_files_fit() -> None:
    params = load_params(ROOT / "params.yaml")
    assert list(params.ladder.rungs) == ["local"]
    profiles = sorted((ROOT / "profiles").glob("*.yaml"))
    assert {p.stem for p in profiles} >= set(params.ladder.rungs)
    for profile in profiles:
        load_profile(profile)


def test_top_of_the_ladder_is_the_last_rung() -> None:
    assert Ladder(rungs={"local": "ground", "node8": "local"}).top == "node8"


@pytest.mark.parametrize(
    ("rungs", "rule"),
    [
        ({"local": "node8"}, "stands above 'ground', not 'node8'"),
        ({"local": "ground", "node8": "ground"}, "stands above 'local', not 'ground'"),
        ({"ground": "ground"}, "name the rung otherwise"),
    ],
)
def test_ladder_is_a_chain(rungs: dict[str, str], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        Ladder(rungs=rungs)


@pytest.mark.parametrize(("steps", "kill_after", "fits"), [(3, 1, True), (8, 6, True), (8, 7, False), (3, 2, False)])
def test_resume_loses_at_least_one_step(steps: int, kill_after: int, fits: bool) -> None:
    values = {"max_loss_gap": 0.0, "max_weight_gap": 0.0, "max_logit_gap": 0.0, "time_limit": 1}
    if fits:
        assert ResumeParams.model_validate({"steps": steps, "kill_after": kill_after, **values}).kill_after == kill_after
    else:
        with pytest.raises(ValidationError, match="kill_after"):
            ResumeParams.model_validate({"steps": steps, "kill_after": kill_after, **values})


def test_profile_and_params_share_no_key() -> None:
    """A key in both would be identity and execution at once."""
    of_params = {name for c in CLASSES if c is not Profile for name in c.model_fields}
    assert of_params.isdisjoint(Profile.model_fields)


def test_missing_profile_names_those_there(tmp_path: Path) -> None:
    (tmp_path / "node8.yaml").write_text("{}")
    with pytest.raises(Exception, match=r"local\.yaml: no such profile.*node8"):
        load_profile(tmp_path / "local.yaml")
