"""Two different models train together, each on its half of the task; one of them going away costs the other nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.loop import train
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.storage.files import read_json
from rlflow_environments.swarm.messages import dump
from rlflow_environments.swarm.shared_folder import DirectoryTransport
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE
from tests.unit.environments.swarm.peers import lied, said

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_trains_two_peers_that_take_groups_from_each_other(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "RLFLOW_SWARM": str(tmp_path),
        "RLFLOW_VENV": str(Path(sys.prefix)),
    }
    command = [
        "bash",
        "recipes/swarm/run_train.sh",
        "run.steps=15",
        "metrics.progress=none",
        "evaluation.every_steps=0",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=400, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    taken = 0.0
    for peer in ("first", "second"):
        records = [
            record
            for record in read_metrics(tmp_path / peer / "metrics.jsonl")
            if "train/loss" in record
        ]
        assert (
            len(records) == 15
            and read_json(tmp_path / peer / "summary.json")["status"] == "finished"
        )
        assert all(
            record["train/swarm_published"] == 6 and record["train/swarm_rejected"] == 0
            for record in records
        )
        taken += sum(record["train/swarm_external"] for record in records)
        for record in records:
            assert record["train/swarm_external"] + record["train/swarm_missing"] == 6
            assert record["train/ratio"] == pytest.approx(
                1, abs=1e-6
            )  # log-probs before the update are the policy's own
            assert record["rollout/episodes"] == 48  # its own: others' are no rollouts of this run
    assert taken > 6


def test_a_run_in_a_swarm_learns_from_what_is_there_and_goes_on_without(tmp_path: Path) -> None:
    """A peer shares two groups of which one is a lie, and some garbage, and is never heard of again."""
    model, shared = write_letters_model(tmp_path / "model"), tmp_path / "shared"
    good, lie = (
        said("train-ab", "ab", "fb"),
        lied(said("train-cd", "cd", "ff"), rewards=[0, 1], task={"answer": ["f", "f"]}),
    )
    DirectoryTransport("you", str(shared)).publish(
        [dump(good, "you"), lie, b"garbage", b"x" * 2**21]
    )
    swarm = f"[{{name: swarm, peer: me, external: 2, transport: {{name: directory, path: '{shared}'}}}}]"
    values = ("run.steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "evaluation.at_start=false",
              "evaluation.questions=4", "evaluation.final_questions=4", "metrics.picture=false", f"trainer.backend={ORACLE}",
              "checkpoint.export=false", "metrics.trajectories_per_step=40", f"algorithm.filters={swarm}",
              "algorithm.losses=[{name: ppo_clip, anchor: proximal}]")  # fmt: skip
    train(letters_config(model, tmp_path, *values))
    first, second = (
        record
        for record in read_metrics(tmp_path / "letters" / "metrics.jsonl")
        if "train/loss" in record
    )
    assert (
        first["train/swarm_external"],
        first["train/swarm_rejected"],
        first["train/swarm_missing"],
    ) == (2, 1, 0)
    assert first["train/ratio"] == pytest.approx(1, abs=1e-6) and first["rollout/episodes"] == 8
    assert (
        second["train/swarm_external"],
        second["train/swarm_missing"],
        second["train/swarm_published"],
    ) == (0, 2, 4)
    rows = read_trajectories(tmp_path / "letters" / "trajectories" / "step_000001.jsonl")
    scores = sorted(row["reward"] for row in rows if row["source"] == "external")
    assert len(rows) == 12 and scores == [0.0, 0.5, 1.0, 1.0]  # as this run's own answers have it
