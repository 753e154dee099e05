"""Experiments: what was made is not made again, what fails is told, and the samples are as stale as they are said to be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

import experiments
from experiments import reports
from experiments.base import all_of, beats, keeps
from experiments.cells import Cell, CellLog
from experiments.tiny import Tiny, learned, tiny

from rlflow.batching import make_batch
from rlflow.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

SCRIPT = """
import json, pathlib, sys, time
import claims
from experiments.base import Experiment, average

out = pathlib.Path(sys.argv[1])
made = out / "made.txt"

def run(arm, seed, quick):
    with made.open("a") as file:
        file.write(f"{arm} {seed}\\n")
    if arm == "slow" and not (out / "fast").exists():
        time.sleep(60)
    if arm == "wrong" and not (out / "fast").exists():
        raise ValueError("of no use")
    return {"success": {"good": 1.0, "slow": 0.5, "wrong": 0.25}[arm] + seed / 10, "curve": [0.0, 1.0]}

def judge(results):
    return average(results, "good", "success") > average(results, "wrong", "success"), "by the mean"

one = Experiment("fake", "A system (2026)", "it is good", "nothing", "good is above wrong", ("good", "slow", "wrong"),
                 ("success",), run, judge, imports=(), deadline_s=0.7)
codes = []
for _ in range(2):
    codes.append(claims.run([one], out, seeds=[0, 1], quick=False, docs=False))
    (out / "fast").touch()
    with (out / "cells.jsonl").open("a") as file:
        file.write('{"cell": {"exper')
print(json.dumps(codes))
"""


def script(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what other tests have loaded into this one may not survive a fork."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_second_call_makes_only_what_is_missing(tmp_path: Path) -> None:
    run = script("-c", SCRIPT, str(tmp_path))
    assert run.returncode == 0, run.stderr
    *_, last, codes = run.stdout.splitlines()
    assert json.loads(codes) == [1, 0]
    made = (tmp_path / "made.txt").read_text().splitlines()
    assert sorted(made) == sorted(
        2 * ["slow 0", "slow 1", "wrong 0", "wrong 1"] + ["good 0", "good 1"]
    )
    assert (
        "fake, slow, seed 0: no end after 1 s" in run.stderr
        and "ValueError: of no use" in run.stderr
    )
    told = json.loads(last)["experiments"]["fake"]
    assert (
        told["reproduces"] is True
        and told["missing"] == 0
        and told["arms"]["good"]["success"]["mean"] == pytest.approx(1.05)
    )
    page = (tmp_path / "claims.md").read_text()
    assert "| good | 1.05 (1 to 1.1) |" in page and "**Verdict: reproduces: by the mean**" in page


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_in_one_line() -> None:
    refused = {
        ("--only", "areel"): "there is no experiment 'areel'. Did you mean 'areal'?",
        ("--seeds", "0"): "expected how many (1 or more), or seeds such as 3,4,5; found '0'",
        ("--seeds", "3,x"): "found '3,x'",
        ("--seeds", "3,3"): "found '3,3'",
    }
    run = script(
        "-c", f"import claims; print([claims.main(list(each)) for each in {list(refused)}])"
    )
    assert run.stdout == f"{[2] * len(refused)}\n"
    for line, said in zip(run.stderr.splitlines(), refused.values(), strict=True):
        assert line.startswith("claims: ") and said in line


def test_a_cell_of_another_version_is_not_taken_for_this_one(tmp_path: Path) -> None:
    log = CellLog(tmp_path / "cells.jsonl")
    log.append(Cell("a", "b", 0, False, 1), {"x": float("nan"), "y": 1.0}, seconds=1.0)
    again = CellLog(log.path)
    assert again.get(Cell("a", "b", 0, False, 1)) == {"x": None, "y": 1.0}
    assert again.get(Cell("a", "b", 0, False, 2)) is again.get(Cell("a", "b", 0, True, 1)) is None


def test_the_rules_compare_means_and_every_seed() -> None:
    results = {
        name: [{"success": value} for value in row]
        for name, row in {"a": (0.9, 0.8), "b": (0.7, 0.79)}.items()
    }
    assert (
        beats(results, "a", "b")[0]
        and not beats(results, "a", "b", by=0.2)[0]
        and not beats(results, "b", "a")[0]
    )
    assert keeps(results, "b", "a", share=0.87)[0] and not keeps(results, "b", "a", share=0.88)[0]
    assert all_of((True, "one"), (False, "two")) == (False, "one; NOT two")


def test_a_figure_that_no_seed_has_is_a_dash() -> None:
    assert (
        reports.shown([float("nan")] * 2) == "-" and reports.shown([0.5, 1.0]) == "0.75 (0.5 to 1)"
    )


def test_a_block_of_a_page_is_exchanged_and_the_rest_stays() -> None:
    page = reports.with_block("# Title\n\ntext\n", "one", "first")
    page = reports.with_block(reports.with_block(page, "two", "other"), "one", r"\1 second")
    assert page.startswith("# Title\n\ntext\n") and "first" not in page and page.count("<!--") == 4
    assert page.index(r"\1 second") < page.index("other")


def test_every_experiment_says_what_it_tests() -> None:
    for one in experiments.load():
        assert (
            one.name in experiments.NAMES
            and len(set(one.arms)) == len(one.arms) > 1
            and one.columns
        )
        assert set(one.arms_of(True)) <= set(one.arms) and one.claim and one.setup and one.rule
    with pytest.raises(ConfigError, match="no experiment 'nothing'"):
        experiments.load(["nothing"])


@pytest.fixture(scope="module")
def late() -> Iterator[list[tuple[Tiny, list]]]:
    """A run at staleness 2 after four steps, with the groups of each."""
    with tiny(0, preset="areal") as run:
        run.trainer.snapshot("start")
        yield [(run, groups) for _, groups in run.train(steps=4, lag=2)]


def test_samples_are_of_the_policy_as_it_was_so_many_steps_ago(
    late: list[tuple[Tiny, list]],
) -> None:
    run = late[0][0]
    for step, (_, groups) in enumerate(late):
        batch = make_batch([trajectory for group in groups for trajectory in group.trajectories])
        assert set(batch.versions[batch.loss_mask].tolist()) == {max(0, step - 2)}
        start = run.trainer.score(batch, model="start")["logprobs"][batch.loss_mask]
        gap = float((start - batch.logprobs[batch.loss_mask]).abs().max())
        assert (gap < 1e-5) == (step <= 2)  # the last one is of the policy after the first step


def test_success_is_the_chance_that_a_sampled_answer_is_right(
    late: list[tuple[Tiny, list]],
) -> None:
    """Against the share of right answers among many samples of the same policy."""
    run = late[0][0]
    run.rollout.load_weights(run.weights(), version=9)
    groups = run.rollout.collect(
        run.rollout.environment.tasks("val"), step=50, samples_per_prompt=40
    )
    rewards = torch.tensor(
        [trajectory.reward for group in groups for trajectory in group.trajectories]
    )
    chance, count = run.success(), len(rewards)
    assert (
        abs(float((rewards == 1).float().mean()) - chance)
        < 5 * (chance * (1 - chance) / count) ** 0.5 + 1e-3
    )


@pytest.mark.parametrize("name", ["areal", "astraflow", "llamarl"])
def test_a_quick_cell_of_each_experiment_about_staleness_runs(name: str) -> None:
    [one] = experiments.load([name])
    figures = one.run(one.arms_of(True)[-1], 0, True)
    assert 0 < figures["start"] < 0.1 and 0 < figures["success"] <= 1 and not figures["collapsed"]


@pytest.mark.slow
def test_few_bfloat16_weights_change_at_a_small_learning_rate() -> None:
    [one] = experiments.load(["sparsity"])
    small, large = (one.run(arm, 0, True) for arm in (one.arms[0], one.arms[-1]))
    assert (
        0.9 < small["unchanged"] < 1
        and large["unchanged"] < 0.5
        and small["bytes_ratio"] > 10 > large["bytes_ratio"]
    )


def test_a_run_whose_loss_is_not_finite_has_collapsed() -> None:
    with tiny(0, "trainer.lr=1e30", "rollout.prompts_per_step=2") as run:
        assert learned(run, steps=4)["collapsed"] == 1
