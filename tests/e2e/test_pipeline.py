"""The whole pipeline, for real: what it leaves behind, what runs again, what comes back.

Wrong behaviour these catch: metrics that do not add up, a no-op that computes or imports torch, a learning rate that repacks, a
revert that trains again, an export that does not load or answers otherwise than it was scored.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.project import Project, stages_run

pytestmark = pytest.mark.e2e

NAMES = {  # design: the names others rely on
    "format": "rows_in rows_kept rows_duplicate rows_rejected rejected_by_reason train_rows validation_rows sources",
    "pack": "documents documents_dropped tokens_in tokens_kept tokens_truncated tokens_dropped sequences fill "
    "supervised_tokens supervised_share seconds tokens_per_second",
    "smoke-local": "checks loss_first loss_last tokens_per_second_per_gpu peak_gib_measured peak_gib_planned",
    "resume-local": "checks steps killed_at max_loss_gap ids_equal weights_equal",
    "train": "steps tokens loss_first loss_last eval_loss tokens_per_second_per_gpu mfu peak_gib seconds clip_share "
    "world_size resumed_from",
    "export": "parameters tensors bytes dtype max_logit_gap peak_host_gib seconds",
    "evaluate": "base tuned rows",
}


def metrics(project: Project, name: str) -> dict:
    return json.loads((project.root / "metrics" / f"{name}.json").read_text(encoding="utf-8"))


def test_metrics_carry_the_agreed_names_and_add_up(finished: Project) -> None:
    for name, fields in NAMES.items():
        assert set(fields.split()) <= set(metrics(finished, name)), name
    rows = metrics(finished, "format")
    assert rows["rows_in"] == rows["rows_kept"] + rows["rows_duplicate"] + rows["rows_rejected"] > 100
    assert rows["rows_rejected"] == sum(rows["rejected_by_reason"].values()) > 0
    assert rows["rows_kept"] == rows["train_rows"] + rows["validation_rows"]
    rejects = (finished.root / "data/formatted/rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rejects) == rows["rows_rejected"]
    packed = metrics(finished, "pack")
    assert packed["documents"] == rows["rows_kept"]
    assert packed["tokens_in"] == packed["tokens_kept"] + packed["tokens_truncated"] + packed["tokens_dropped"]
    assert 0.9 < packed["fill"] <= 1.0
    trained = metrics(finished, "train")
    assert trained["loss_last"] < trained["loss_first"]
    assert trained["world_size"] == 2
    curve = (finished.root / "plots/train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in curve] == list(range(1, trained["steps"] + 1))


def test_every_check_of_both_gates_passed(finished: Project) -> None:
    for gate in ("smoke-local", "resume-local"):
        checks = metrics(finished, gate)["checks"]
        assert len(checks) >= 8
        assert all(check["passed"] for check in checks.values()), checks
    resumed = metrics(finished, "resume-local")
    assert (resumed["ids_equal"], resumed["weights_equal"], resumed["max_loss_gap"]) == (True, True, 0)


def test_nothing_is_stale_and_a_second_run_computes_nothing(finished: Project) -> None:
    assert "up to date" in finished.run("dvc", "status").stdout
    done = finished.run(sys.executable, "-X", "importtime", "-m", "dvc", "repro")
    assert done.returncode == 0
    assert stages_run(done.stdout) == []
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "dvc.repo" in imported
    assert not {"torch", "transformers", "prefect"} & imported


def test_export_loads_elsewhere_and_answers_as_it_was_scored(finished: Project) -> None:
    script = (
        "import json, sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('models/export')\n"
        "tokenizer = AutoTokenizer.from_pretrained('models/export')\n"
        "row = json.loads(open('metrics/answers.jsonl', encoding='utf-8').readline())\n"
        "ids = tokenizer(row['prompt'], return_tensors='pt', add_special_tokens=False)\n"
        "new = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids['input_ids'].shape[1]:]\n"
        "stop = model.generation_config.eos_token_id\n"
        "assert stop == tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.convert_tokens_to_ids('<|end|>')\n"
        "kept = new.tolist()[: new.tolist().index(stop)] if stop in new.tolist() else new.tolist()\n"
        "answer = tokenizer.decode(kept)\n"
        "assert answer == row['tuned'], (answer, row)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=finished.root, env=finished.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_learning_rate_runs_gates_and_training_only_and_its_revert_restores(copy: Project) -> None:
    before = (copy.root / "models/checkpoint.json").read_bytes()
    copy.replace("params.yaml", "learning_rate: 3.0e-3", "learning_rate: 2.0e-3")
    changed = copy.repro()
    assert changed.returncode == 0, changed.stderr[-2000:]
    # The gates read the train section by design: a verdict is for exactly these parameters.
    assert stages_run(changed.stdout) == ["smoke@local", "resume@local", "train", "export", "evaluate"]
    assert (copy.root / "models/checkpoint.json").read_bytes() != before
    copy.replace("params.yaml", "learning_rate: 2.0e-3", "learning_rate: 3.0e-3")
    reverted = copy.repro()
    assert reverted.returncode == 0, reverted.stderr[-2000:]
    assert stages_run(reverted.stdout) == []
    assert (copy.root / "models/checkpoint.json").read_bytes() == before
    assert "up to date" in copy.run("dvc", "status").stdout
