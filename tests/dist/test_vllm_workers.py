"""A run whose rollout workers have an engine of vLLM each, which cannot hash its weights: two steps, every update probed.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlflow.cluster.pool import WorkerPool
from rlflow.errors import RolloutError
from rlflow.loop import train
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.weight_sync import WeightProbe
from rlflow.run.rollout_workers import WorkerRollout
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE
from tests.unit.rollout.vllm.real import NEEDS_VLLM

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]


def test_a_worker_with_vllm_passes_the_probe_after_every_update_and_old_weights_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = write_letters_model(tmp_path / "model", **sizes)
    options = ("run.steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8", "evaluation.questions=4",
               "evaluation.final_questions=4", "evaluation.every_steps=0", f"trainer.backend={ORACLE}", "trainer.lr=0.05",
               "rollout.engine={name: vllm, max_concurrency: 16}", "cluster.rollout_workers=1")  # fmt: skip
    passed: list[int] = []
    compare = WorkerPool._pass

    def noted(pool: WorkerPool, slot: object) -> None:
        compare(pool, slot)  # type: ignore[arg-type]
        passed.append(slot.passed)  # type: ignore[attr-defined]

    monkeypatch.setattr(WorkerPool, "_pass", noted)
    assert train(letters_config(model, tmp_path / "runs", *options))["steps"] == 2
    assert passed == [1, 2]

    load = WorkerRollout.load_weights

    def stale(
        rollout: WorkerRollout, _: object, version: int, probe: WeightProbe | None = None
    ) -> None:
        load(
            rollout, iterate_weights(model), version, probe
        )  # whole and undamaged, and those of version 0

    monkeypatch.setattr(WorkerRollout, "load_weights", stale)
    with pytest.raises(
        RolloutError,
        match=r"after version 1 engine and trainer differ by .* nats on a token of the probe",
    ):
        train(letters_config(model, tmp_path / "off", *options))
