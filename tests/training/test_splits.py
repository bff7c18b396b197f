"""The same training whatever the split: losses, gradient norms and weights of real engines on one and two gloo ranks, held
against a plain loop over single documents (`tiny.reference`).

Would catch: a loss averaged by rank or by micro-batch instead of by supervised token, a gradient summed or divided once too often
at some ZeRO stage, clipping of a partitioned gradient by a part of its norm, adapters drawn differently on each rank, rows dealt
out differently, a limit that does nothing, clipping that a resumed run begins anew, ranks that share a sequence and miss its
other half.

Rows have 1 to nearly all tokens supervised. Adam's epsilon is 1e-5: at 1e-8 the first step is lr x sign(gradient), and where a
gradient is rounding its sign is chance. Largest gaps found over all cases: loss 2.1e-7, norm 9.9e-7 (relative), weights 3.9e-6
(absolute, of a way of 3e-3). Allowed: five times as much.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("torch")

from pipeline.training.batching import DataOrder  # noqa: E402 - after the check for torch
from pipeline.training.clipping import AdaptiveLimit  # noqa: E402
from tests.training.making import LORA, train_params  # noqa: E402
from tests.training.tiny import Set, Trained, make_set, reference, train_all, uneven_rows  # noqa: E402

pytestmark = pytest.mark.e2e

STEPS = 3
LOSS, NORM, WEIGHT = 1e-6, 5e-6, 2e-5

FULL: dict[str, Any] = {"adam_epsilon": 1e-5, "clipping": {"kind": "fixed", "max_norm": 1.0}}
TUNINGS = {"full": FULL, "lora": {**FULL, "tuning": LORA}}
TINY_LIMIT = {**FULL, "clipping": {"kind": "fixed", "max_norm": 1e-6}}
ADAPTIVE = {**FULL, "clipping": {"kind": "adaptive", "max_norm": 100.0, "window": 2, "deviations": 0.5}}

SPLITS = {"1x8x1": (1, 8), "2x2x2": (2, 2), "2x1x4": (2, 1)}
"""Ranks x micro-batch x accumulation: ranks, micro-batch."""

MATRIX = [(stage, tuning, split) for stage in range(4) for tuning in TUNINGS for split in SPLITS]


def name_of(stage: int, tuning: str, split: str) -> str:
    return f"zero{stage}-{tuning}-{split}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Set:
    return make_set(tmp_path_factory.mktemp("splits"), uneven_rows(20), uneven_rows(5))


@pytest.fixture(scope="module")
def trained(made: Set) -> dict[str, Trained]:
    """All runs, by name, in two launches."""
    found: dict[str, Trained] = {}
    for ranks in (1, 2):
        specs = {
            name_of(stage, tuning, split): made.spec(
                name_of(stage, tuning, split),
                steps=STEPS,
                params=TUNINGS[tuning],
                machine={"zero": stage, "ranks": ranks, "micro_batch": SPLITS[split][1]},
            )
            for stage, tuning, split in MATRIX
            if SPLITS[split][0] == ranks
        }
        if ranks == 2:
            for stage in range(4):
                machine = {"zero": stage, "ranks": 2, "micro_batch": 2}
                specs[f"tiny-limit-{stage}"] = made.spec(f"limit-{stage}", steps=STEPS, params=TINY_LIMIT, machine=machine)
            for stage in (2, 3):
                machine = {"zero": stage, "ranks": 2, "micro_batch": 4, "sequence_parallel": 2}
                specs[f"shared-{stage}"] = made.spec(f"shared-{stage}", steps=STEPS, params=FULL, machine=machine)
                machine = {"zero": stage, "ranks": 2, "micro_batch": 2, "activation_checkpointing": 0.5, "tiled_mlp": 2}
                specs[f"recomputed-{stage}"] = made.spec(f"recomputed-{stage}", steps=STEPS, params=FULL, machine=machine)
            for stage in (0, 2):
                run = f"adaptive-{stage}"
                machine = {"zero": stage, "ranks": 2, "micro_batch": 2, "checkpoint_every": 3}
                specs[run] = made.spec(run, steps=6, params=ADAPTIVE, machine=machine)
                specs[f"resumed-{stage}"] = made.spec(
                    "resumed", steps=6, params=ADAPTIVE, machine=machine, run=run, resume_from="checkpoint-3"
                )
        found |= train_all(made.folder, specs)
    return found


@pytest.fixture(scope="module")
def plain(made: Set) -> Any:
    """The plain loop's losses, norms and weights by kind of run."""
    kinds = {**TUNINGS, "tiny limit": TINY_LIMIT, "adaptive": ADAPTIVE}
    return lru_cache(lambda kind: reference(made, kinds[kind], 6 if kind == "adaptive" else STEPS))


def assert_equal(run: Trained, losses: list[float], norms: list[float], weights: dict[str, Any]) -> None:
    assert run.column("loss") == pytest.approx(losses, rel=LOSS)
    assert run.column("grad_norm") == pytest.approx(norms, rel=NORM)
    assert run.weights.keys() == weights.keys()
    gaps = {name: float((run.weights[name] - weights[name]).abs().max()) for name in weights}
    assert max(gaps.values()) < WEIGHT, max(gaps.items(), key=lambda item: item[1])


def way(made: Set, weights: dict[str, Any]) -> float:
    """Furthest that a weight of the base was moved."""
    from safetensors.torch import load_file

    base = load_file(made.model / "model.safetensors")
    assert base.keys() == weights.keys()
    return max(float((weights[name] - base[name]).abs().max()) for name in base)


@pytest.mark.parametrize(("stage", "tuning", "split"), MATRIX)
def test_every_stage_tuning_and_split_trains_as_the_plain_loop(
    stage: int, tuning: str, split: str, trained: dict[str, Trained], plain: Any
) -> None:
    assert_equal(trained[name_of(stage, tuning, split)], *plain(tuning))


def test_the_runs_have_moved_the_weights_they_train_and_no_other(made: Set, trained: dict[str, Trained]) -> None:
    from safetensors.torch import load_file

    assert way(made, trained["zero2-full-2x2x2"].weights) > 2e-3
    base = load_file(made.model / "model.safetensors")
    adapted = trained["zero2-lora-2x2x2"].weights
    moved = [float(value.abs().max()) for name, value in adapted.items() if "lora_B" in name]
    assert len(moved) == 14
    assert min(moved) > 1e-3
    frozen = {n.removeprefix("base_model.model.").replace(".base_layer", ""): v for n, v in adapted.items() if "lora_" not in n}
    assert frozen.keys() == base.keys()
    assert all(bool((value == base[name]).all()) for name, value in frozen.items())


def test_each_step_sees_its_rows_once_over_all_ranks(made: Set, trained: dict[str, Trained]) -> None:
    order = list(DataOrder(len(made.rows), 1, 8 * STEPS))
    for stage, tuning, split in MATRIX:
        seen = trained[name_of(stage, tuning, split)].seen
        assert len(seen) == SPLITS[split][0]
        for step in range(STEPS):
            expected = [int(d) for r in order[8 * step : 8 * step + 8] for d in made.rows[r]["documents"]]
            assert sorted(d for rank in seen for d in rank[step]) == sorted(expected)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_held_out_loss_and_throughput_counts_are_those_of_the_data(
    tuning: str, made: Set, trained: dict[str, Trained], plain: Any
) -> None:
    order = list(DataOrder(len(made.rows), 1, 8 * STEPS))
    tokens = sum(len(made.rows[r]["input_ids"]) for r in order)
    results = [trained[name_of(s, t, split)].result for s, t, split in MATRIX if t == tuning]
    assert {r["tokens"] for r in results} == {tokens}
    assert [r["eval_loss"] for r in results] == pytest.approx([results[0]["eval_loss"]] * len(results), rel=LOSS)
    assert {r["clip_share"] for r in results} == {sum(norm > 1.0 for norm in plain(tuning)[1]) / STEPS}


@pytest.mark.parametrize("stage", range(4))
def test_a_tiny_clip_limit_changes_the_update(stage: int, made: Set, trained: dict[str, Trained], plain: Any) -> None:
    run, unlimited = trained[f"tiny-limit-{stage}"], trained[name_of(stage, "full", "2x2x2")]
    assert_equal(run, *plain("tiny limit"))
    assert run.column("limit") == [1e-6] * STEPS
    assert run.column("grad_norm")[0] == pytest.approx(unlimited.column("grad_norm")[0], rel=NORM)  # logged before clipping
    assert way(made, run.weights) < 0.1 * way(made, unlimited.weights)


@pytest.mark.parametrize("stage", [0, 2])
def test_adaptive_clipping_follows_the_norms_and_a_resumed_run_has_the_same_limits(
    stage: int, trained: dict[str, Trained], plain: Any
) -> None:
    straight, resumed = trained[f"adaptive-{stage}"], trained[f"resumed-{stage}"]
    assert_equal(straight, *plain("adaptive"))
    clipping: Any = train_params(**ADAPTIVE).clipping
    rule, limits = AdaptiveLimit(clipping), []
    for norm in straight.column("grad_norm"):
        limits.append(rule.limit)
        rule.observe(norm)
    assert straight.column("limit") == pytest.approx(limits, rel=1e-6)
    assert limits[:2] == [100.0, 100.0]
    assert all(limit < 50.0 for limit in limits[2:])
    assert any(norm > limit for norm, limit in zip(straight.column("grad_norm"), limits, strict=True)), "nothing was clipped"
    assert resumed.result["resumed_from"] == 3
    for column in ("step", "loss", "grad_norm", "limit"):
        assert resumed.column(column) == straight.column(column)
    assert all(bool((resumed.weights[name] == value).all()) for name, value in straight.weights.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_that_share_sequences_train_as_one(stage: int, trained: dict[str, Trained], plain: Any) -> None:
    assert_equal(trained[f"shared-{stage}"], *plain("full"))


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_activations_and_a_tiled_mlp_change_nothing(stage: int, trained: dict[str, Trained], plain: Any) -> None:
    assert_equal(trained[f"recomputed-{stage}"], *plain("full"))
