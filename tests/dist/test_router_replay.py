"""Router replay where rollout or trainer are other processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from tests.dist.test_rollout_workers import IN_STEP, assert_same, outcome
from tests.flow.letters import letters_config, write_letters_model

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
EXPERTS = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1], "scale": 0.3}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "experts", "qwen3_moe", **EXPERTS)


def steps_of(runs: Path) -> list[dict[str, float]]:
    return [
        one
        for one in read_metrics(RunDirectory.open(runs / "letters").metrics)
        if "train/loss" in one
    ]


def test_routes_of_a_worker_s_tokens_are_those_of_one_process(
    experts: Path, tmp_path: Path
) -> None:
    """The same weights bit for bit, and every route the trainer's own."""
    replay = "trainer.router_replay=rollout"
    expected = outcome(letters_config(experts, tmp_path / "alone", *IN_STEP, replay))
    found = letters_config(experts, tmp_path / "one", *IN_STEP, replay, "cluster.rollout_workers=1")
    assert_same(outcome(found), expected)
    steps = steps_of(tmp_path / "one")
    assert len(steps) == 3 and not any(step["train/routes_differ"] for step in steps)


@pytest.mark.parametrize("replay", ["rollout", "recompute"])
def test_two_ranks_that_share_the_experts_replay_as_one_process(
    experts: Path, tmp_path: Path, replay: str
) -> None:
    options = (
        *IN_STEP,
        f"trainer.router_replay={replay}",
        "algorithm.minibatches_per_step=2",
        "evaluation.every_steps=0",
    )
    ranks = ("cluster.ranks=2", "trainer.expert_parallel=2")
    outcome(letters_config(experts, tmp_path / "alone", *options))
    outcome(letters_config(experts, tmp_path / "ranks", *options, *ranks))
    alone, shared = steps_of(tmp_path / "alone")[0], steps_of(tmp_path / "ranks")[0]
    for name in ("loss", "gradient_norm", "expert_load_max", "expert_spread", "ratio", "reward"):
        assert shared[f"train/{name}"] == pytest.approx(
            alone[f"train/{name}"], rel=1e-3, abs=1e-6
        ), name
