"""The safety table: the table policy is what it is said to be, and the verdicts are by its figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

from experiments import table_policy
from experiments.table_policy import (
    TableTrainer,
    expected_reward,
    make_algorithm,
    right_answers,
    sampled,
    train_table,
)

from rlflow.batching import make_batch
from rlflow.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

PPO = {"losses": [{"name": "ppo_clip"}], "minibatches_per_step": 2}


def test_the_table_gives_the_log_probs_that_its_samples_were_drawn_by() -> None:
    trainer = TableTrainer(lr=0.1)
    with torch.no_grad():
        trainer.model.table.normal_(generator=torch.Generator().manual_seed(1))
    groups = sampled(trainer.logprobs(), right_answers(0), 3, torch.Generator().manual_seed(2))
    batch = make_batch([trajectory for group in groups for trajectory in group.trajectories])
    assert torch.allclose(trainer.score(batch)["logprobs"], batch.logprobs, atol=1e-6)
    assert (
        set(batch.versions[batch.loss_mask].tolist()) == {3} and batch.loss_mask.sum() == 4 * 8 * 3
    )
    right = right_answers(0)[batch.tokens[:, 0]]
    assert torch.equal((batch.tokens[:, 1:] == right).double().mean(dim=1), batch.rewards)


def test_the_optimum_is_one_and_a_run_begins_at_chance() -> None:
    right = right_answers(0)
    assert expected_reward(TableTrainer(lr=0.1).logprobs(), right) == pytest.approx(
        table_policy.CHANCE
    )
    best = torch.full((4, 3, 8), -100.0).scatter(2, right[:, :, None], 100.0).log_softmax(dim=-1)
    assert expected_reward(best, right) == pytest.approx(1) and table_policy.entropy(
        best
    ) == pytest.approx(0, abs=1e-6)


def test_on_fresh_samples_the_plain_clip_comes_near_the_optimum() -> None:
    trainer, right = TableTrainer(lr=0.1), right_answers(0)
    for _ in train_table(make_algorithm(PPO, 0), trainer, right, steps=60, lag=0, seed=0):
        pass
    assert expected_reward(trainer.logprobs(), right) > 0.8


def test_a_combination_that_rlflow_refuses_has_no_cell() -> None:
    with pytest.raises(ConfigError, match="applied twice"):
        make_algorithm({"losses": ["ppo_clip"], "transforms": ["tis"]}, 0)


SCRIPT = """
import safety
stuck, going, done = ({"reward": r, "best": r, "entropy": e} for r, e in ((0.6, 0.01), (0.6, 1.0), (0.96, 0.01)))
assert [safety.verdict([one]) for one in (stuck, going, done)] == ["collapses", "on its way", "reaches"]
assert safety.verdict([done, done, stuck]) == "reaches"
assert safety.verdict([{**done, "reward": 0.1, "entropy": 2.0}]) == "collapses"
assert safety.verdict([done, done, {"reward": None, "best": 1, "entropy": None}]) == "collapses"
assert safety.refused("ppo_clip", "none") == "" and "share one ratio" in safety.refused("gspo", "icepop")
assert "collapses" in safety.tables.__globals__["SIGNS"]
cell = safety.measured("aipo", "dppo", 4, 0, steps=6)
assert 0.05 < cell["reward"] < 1 and cell["entropy"] > 0, cell
table = safety.tables({("aipo", "dppo"): {lag: [done] for lag in safety.LAGS}})
assert "| dppo | - | - | - | - | - | `+++++` | - | - |" in table and "0.96 0.96 0.96" in table and "Of one seed." in table
told = safety.spread({("aipo", "dppo"): {0: [done, done, done], 4: [done, {**done, "reward": 0.85}, {**done, "reward": 0.9}]}})
assert "median of 3 seeds" in told and "by 0.055 in the median combination and by 0.11 at the most" in told, told
assert "different signs at 4: `aipo` with dppo." in told and "same signs" in safety.spread({("aipo", "dppo"): {0: [done] * 2}})
"""


@pytest.mark.slow
def test_a_verdict_is_by_the_median_seed_and_by_what_a_policy_can_still_find_out() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
