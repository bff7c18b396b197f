"""`ladder bench train`: a real plan on one CPU rank, and how figures are shown.

Would catch: figures that are not those of a plan, a failed plan that ends the table or shows as zero, an unknown shape that
surfaces as a traceback, documents longer than a row or trained on beyond the stated share, something written into the project.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from pipeline.config.errors import ConfigError  # noqa: E402 - after the check for torch
from pipeline.dataset.masking import IGNORED  # noqa: E402
from pipeline.planning import training_bench  # noqa: E402
from pipeline.planning.training_bench import FORMULA, SHAPES, Measured, Plan, as_json, bench_train, plans, table  # noqa: E402

PLAN = Plan("fast, all of it", 8, 2, 4096, {"kernels": "compiled"})

QUANTISED = {"zero": 3, "zero_plus_plus": {"partition": 1, "quantised_weights": True, "quantised_gradients": False}}

MEASURED = [
    Measured(
        PLAN,
        tokens_per_second=58123.4,
        mfu=0.5512,
        seconds_per_step=1.125,
        peak_gib=70.25,
        reserved_gib=81.0,
        communication_share=0.034,
        loss=10.5,
        versions={"torch": "2.13.0"},
    ),
    Measured(PLAN, tokens_per_second=100.0, seconds_per_step=2.0, peak_gib=1.0, reserved_gib=0.0, loss=1.0),
    Measured(PLAN, failed="rank 1 ran out of GPU memory with 130.0 GiB held"),
]


@pytest.mark.unit
def test_the_table_has_each_plan_and_the_formula() -> None:
    lines = table("1.5b", 2, MEASURED).splitlines()
    assert lines[:2] == ["1.5b, 2 ranks", FORMULA]
    assert table("tiny", 1, []).startswith("tiny, 1 rank\n")
    heads, *rows = lines[3:]
    assert [row.startswith(PLAN.name) for row in rows] == [True] * 3
    assert rows[0].split()[-6:] == ["58,123", "0.551", "1.125", "70.2", "81.0", "3%"]
    assert rows[1].split()[-6:] == ["100", "-", "2.000", "1.0", "0.0", "-"]
    assert rows[2].endswith("rank 1 ran out of GPU memory with 130.0 GiB held")
    assert len(heads) == len(rows[0]) == len(rows[1])


@pytest.mark.unit
def test_json_holds_plan_and_figures_of_each() -> None:
    found = json.loads(as_json("1.5b", 2, MEASURED))
    assert (found["shape"], found["ranks"], found["formula"]) == ("1.5b", 2, FORMULA)
    first, second, third = found["plans"]
    assert first["name"] == PLAN.name
    assert (first["micro_batch"], first["accumulation"], first["capacity"]) == (8, 2, 4096)
    assert first["profile"] == {"kernels": "compiled"}
    assert first["tokens_per_second"] == 58123.4
    assert first["versions"] == {"torch": "2.13.0"}
    assert (second["mfu"], second["failed"]) == (None, None)
    assert (third["tokens_per_second"], third["failed"]) == (None, MEASURED[2].failed)


@pytest.mark.unit
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_plan_of_a_shape_is_a_valid_profile_and_has_a_name_of_its_own(shape: str, ranks: int) -> None:
    made = plans(shape, ranks)
    assert len({plan.name for plan in made}) == len(made) > 1
    for plan in made:
        profile, params = training_bench._profile(plan, ranks), training_bench._params(plan, ranks, cpu=False)
        assert params.global_batch == plan.micro_batch * plan.accumulation * ranks
        assert params.precision.masters == "fp32"
        assert (profile.ranks, profile.micro_batch) == (ranks, plan.micro_batch)


@pytest.mark.unit
@pytest.mark.parametrize("supervised", [1.0, 0.6])
def test_rows_are_full_and_supervised_to_the_stated_share(supervised: float, tmp_path: Path) -> None:
    from pipeline.training.sft import load_packed

    plan = Plan("any", 1, 1, 1024, {}, supervised=supervised)
    training_bench._write_packed(tmp_path / "packed", plan, 512, rows=60)
    rows = load_packed(tmp_path / "packed", "train").with_format("numpy")
    lengths = np.concatenate([row["seq_lengths"] for row in rows])
    assert 32 <= lengths.min() <= lengths.max() <= 1024
    tokens = [len(row["input_ids"]) for row in rows]
    assert tokens == [int(row["seq_lengths"].sum()) for row in rows]
    assert max(tokens) <= 1024
    assert np.mean(tokens) > 0.95 * 1024
    labels = np.concatenate([row["labels"] for row in rows])
    assert np.mean(labels != IGNORED) == pytest.approx(supervised, abs=0.01)
    assert len(load_packed(tmp_path / "packed", "validation")) == 0


@pytest.mark.unit
def test_an_unknown_shape_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        list(bench_train("7c", 1, plans("tiny", 1), 60))
    assert [name for name in ("--shape 7c", *SHAPES, "config.json") if name not in str(caught.value)] == []


@pytest.mark.e2e
def test_a_plan_is_measured_and_one_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(training_bench.__file__).parents[2]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = [Plan("plain", 2, 1, 256, {}), Plan("quantised", 2, 1, 256, QUANTISED)]
    good, bad = bench_train("tiny", 1, chosen, 200)
    assert good.failed is None, good.failed
    assert good.plan == chosen[0]
    assert good.tokens_per_second is not None
    assert good.seconds_per_step is not None
    assert 0.8 * 512 <= good.tokens_per_second * good.seconds_per_step <= 512  # two rows of at most 256 tokens
    assert good.loss == pytest.approx(np.log(512), rel=0.05)  # nothing is known of random tokens
    assert good.peak_gib is not None
    assert 0.1 < good.peak_gib < 10
    assert (good.mfu, good.communication_share) == (None, None)  # no GPU
    assert good.versions is not None
    assert {"torch", "transformers", "deepspeed", "gpu"} <= good.versions.keys()
    assert bad.tokens_per_second is None
    assert bad.failed
    assert "quantised traffic has kernels for GPUs only" in bad.failed
    assert list(tmp_path.iterdir()) == []
