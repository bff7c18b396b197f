"""Ranks that run out of memory: said with what was held, or gone on with half the micro-batch to the same result.

The fault is real code on a real rank: a `sitecustomize` that every rank reads has the forward pass of the last rank raise
torch.OutOfMemoryError at the second step while the micro-batch is larger than one.

Would catch: an error that is lost among the ranks' tracebacks, a retry at the same size or from the first step, one that changes
the global batch and with it the losses, a retry where the profile forbids it, one that goes on for ever.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from pipeline.config.errors import RunFailed  # noqa: E402 - after the check for torch
from pipeline.training.curve import read_curve  # noqa: E402
from pipeline.training.run import smaller, start  # noqa: E402
from pipeline.training.spec import load_spec  # noqa: E402
from tests.training import making  # noqa: E402
from tests.training.tiny import Set, make_set, reference, uneven_rows, with_path  # noqa: E402

FAULT = """
import torch
from pipeline.gates import faults

def patch(module):
    plain = module.PackedTrainer.compute_loss

    def forward(self, *arguments, **named):
        if self.spec.micro_batch > 1 and self.state.global_step == 1 and self.args.process_index == self.spec.ranks - 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")
        return plain(self, *arguments, **named)

    module.PackedTrainer.compute_loss = forward

faults.FAULTS["memory"] = faults.Fault("pipeline.training.trainer", patch, ("", ""), "")
faults.arm("memory")
"""

PARAMS: dict[str, Any] = {"adam_epsilon": 1e-5, "global_batch": 8}
STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Set:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "fault").mkdir()
    (folder / "fault/sitecustomize.py").write_text(FAULT, encoding="utf-8")
    return make_set(folder, uneven_rows(12))


def spec(made: Set, name: str, on_out_of_memory: str, ranks: int) -> Any:
    machine: dict[str, Any] = {
        "ranks": ranks,
        "micro_batch": 2,
        "on_out_of_memory": on_out_of_memory,
        "checkpoint_every": 1,
        "environment": with_path(made.folder / "fault"),
    }
    return made.spec(name, steps=STEPS, params=PARAMS, machine=machine)


@pytest.mark.e2e
def test_it_fails_with_what_was_held_and_what_to_do(made: Set) -> None:
    with pytest.raises(RunFailed) as caught:
        start(spec(made, "fail", "fail", ranks=1), output=made.folder / "fail.log", time_limit=200)
    said = str(caught.value)
    for part in ("rank 0 ran out of GPU memory", "GiB held", "Tried to allocate 2.00 GiB (planted)", "use a smaller micro_batch"):
        assert part in said
    assert "or on_out_of_memory: smaller" in said
    assert len(said.splitlines()) == 1
    assert "planted" in (made.folder / "fail.log").read_text(encoding="utf-8")


@pytest.mark.e2e
def test_it_goes_on_with_half_the_micro_batch_to_the_same_losses(made: Set, capfd: pytest.CaptureFixture[str]) -> None:
    result = start(spec(made, "smaller", "smaller", ranks=2), output=made.folder / "smaller.log", time_limit=200)
    assert result["outcome"] == "finished"
    assert result["resumed_from"] == 1
    said = capfd.readouterr().err
    assert said.count("rank 1 ran out of GPU memory") == 1
    assert "next: micro_batch 1 x accumulation 4" in said
    run = made.folder / "runs/smaller"
    used = load_spec(run / "spec.json")
    assert (used.micro_batch, used.accumulation, used.resume_from) == (1, 4, "checkpoint-1")
    losses, norms, _ = reference(made, PARAMS, STEPS)
    curve = read_curve(run)
    assert [line["step"] for line in curve] == [1, 2, 3]
    assert [line["loss"] for line in curve] == pytest.approx(losses, rel=1e-6)
    assert [line["grad_norm"] for line in curve] == pytest.approx(norms, rel=2e-6)
    assert not (run / "out-of-memory.json").exists()


@pytest.mark.unit
def test_plans_shrink_at_equal_global_batch_and_end() -> None:
    sizes, plan = [], making.spec(machine={"micro_batch": 12, "zero": 2}, cuda=False, accumulation=1)
    while plan is not None:
        sizes.append((plan.micro_batch, plan.accumulation, plan.profile.activation_checkpointing))
        plan = smaller_unchecked(plan)
    assert sizes == [(12, 1, 0.0), (6, 2, 0.0), (3, 4, 0.0), (3, 4, 1.0)]


def smaller_unchecked(plan: Any) -> Any:
    """`smaller` for a spec whose model folder does not exist."""
    import pipeline.training.run as run

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "_check", lambda _: None)
        return smaller(plan)
