"""Every example is a whole configuration that the product accepts.

Wrong behaviour these catch: an example that a schema change left behind; a rung without a profile to copy; a global batch that
does not divide on the example's own profile; a sample whose parameters drift from the shipped ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.schema import load_params, load_profile
from pipeline.training.batching import accumulation_for
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/params.yaml"))


def profile_of(example: Path, rung: str) -> Path:
    """The profile a user of the example has for a rung: the one shipped with it, else one of the repository."""
    places = (example / "profiles" / f"{rung}.yaml", example / "profile.yaml")
    return next((p for p in places if p.is_file()), ROOT / "profiles" / f"{rung}.yaml")


def test_there_are_examples() -> None:
    assert {"sample", "qwen3-8b-full"} <= {example.name for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_parameters_and_profiles_load_and_every_rung_has_one(example: Path) -> None:
    params = load_params(example / "params.yaml")
    used = {profile_of(example, rung) for rung in params.ladder.rungs}
    for path in example.rglob("*.yaml"):
        if path.name != "params.yaml":
            load_profile(path)
            assert path in used, "a profile that no rung of the example uses"
    for rung in params.ladder.rungs:
        load_profile(profile_of(example, rung))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_global_batch_divides_on_every_rung(example: Path) -> None:
    params = load_params(example / "params.yaml")
    for rung in params.ladder.rungs:
        profile = load_profile(profile_of(example, rung))
        ranks = 2 if profile.ranks == "auto" else profile.ranks  # `auto` is 2 on a CPU; on GPUs it takes a number that divides
        assert accumulation_for(params.train.global_batch, profile.micro_batch, ranks) >= 1


def test_the_sample_is_what_ships() -> None:
    assert (ROOT / "examples/sample/params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()
