"""What every rank of a run is told: one JSON file, written by the stage, read by the ranks.

Contract: paths are relative to the repository. The identity of the run is `fingerprint`; what a profile decides (ranks,
micro-batch, ZeRO stage ...) is here too but not in it.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.artifact import canonical, digest_of, digest_text
from pipeline.config.params import Section, TrainParams
from pipeline.config.profile import Profile
from pipeline.fingerprint import code_digest
from pipeline.training.shape import ModelShape

RANK_MODULE = "pipeline.training.sft"
"""The module whose closure is the training code; gates run it too, so what they prove is what `train` runs."""


class Spec(Section):
    fingerprint: str
    """Identity of the full run this belongs to (`run_fingerprint`)."""
    model: str
    """Base model folder."""
    packed: str
    """Packed set."""
    run: str
    """Folder of this run: checkpoints, curve, result."""
    params: TrainParams
    steps: int
    """Optimizer steps in all, from the first."""
    sequences: list[int] | None
    """Rows of the training split to use; null: all."""
    resume_from: str | None
    """Name of the checkpoint folder in `run` to continue from; null: from the base model."""
    profile: Profile
    """How the rung runs; what it leaves to be worked out stands below."""
    cuda: bool
    ranks: int
    threads: int
    micro_batch: int
    accumulation: int
    checkpoint_every: int
    shape: ModelShape
    """Of the base model, for buckets and plans."""

    def save(self) -> Path:
        """Write the spec into its run folder and return its path."""
        path = Path(self.run) / "spec.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return path


def load_spec(path: Path) -> Spec:
    return Spec.model_validate_json(path.read_text(encoding="utf-8"))


def run_fingerprint(params: TrainParams, model: Path, packed: Path) -> str:
    """Identity of a full run: base model, packed data, train section, training code. 64 hex digits.

    Library versions are recorded with the run but are not part of it: a laptop and a cluster differ in them, and what
    matters of the difference is what the gates measure.
    """
    return digest_text(
        canonical(
            {
                "base": digest_of(model, "the base model"),
                "data": digest_of(packed, "the packed set"),
                "train": params.model_dump(mode="json"),
                "code": code_digest(RANK_MODULE),
            }
        )
    )
