"""Recorded episodes join a step in this run's terms: scored here, without log-probs, learned by likelihood alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.algorithms.losses.sft import SFTLoss
from rlflow.algorithms.transforms.only_sources import OnlySources
from rlflow.batching import make_batch
from rlflow.components import FILTER
from rlflow.errors import DataError
from rlflow.report.records import write_trajectories
from rlflow.rollout import Rollout
from rlflow.types import PolicyOutput
from tests.unit.environments.swarm.peers import letters_rollout


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    with letters_rollout() as made:
        yield made


def recorded(path: Path, *episodes: str) -> Path:
    """Each a task `ab` and what was said in its two turns."""
    rows = [
        {
            "task_id": f"train-{one[:2]}",
            "turns": [{"response": letter} for letter in one[2:]],
            "reward": 9,
        }
        for one in episodes
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demonstrations(rollout: Rollout, path: Path, **options: Any) -> Any:
    return FILTER.build(
        {"name": "demonstrations", "path": str(path), **options}, rollout=rollout, seed=0
    )


def test_demonstrations_are_scored_here_and_drawn_anew_in_every_step(
    rollout: Rollout, tmp_path: Path
) -> None:
    part = demonstrations(
        rollout,
        recorded(tmp_path / "d.jsonl", "abab", "cdcx".replace("x", "a"), "efef"),
        episodes=2,
    )
    steps = [part([]) for _ in range(4)]
    assert all(
        len(step) == 2 and all(len(group.trajectories) == 1 for group in step) for step in steps
    )
    rewards = {group.task.id: group.trajectories[0].reward for step in steps for group in step}
    assert rewards == {"train-ab": 1.0, "train-cd": 0.5, "train-ef": 1.0}  # not what the file says
    every = [one for step in steps for group in step for one in group.trajectories]
    assert {one.source for one in every} == {"demonstration"} and len(
        {one.id for one in every}
    ) == 8
    again = demonstrations(rollout, tmp_path / "d.jsonl", episodes=2)
    again.load_state_dict({"steps": 1})
    assert [group.task.id for group in again([])] == [group.task.id for group in steps[1]]


def test_what_a_run_wrote_is_a_file_of_demonstrations(rollout: Rollout, tmp_path: Path) -> None:
    groups = rollout.collect(rollout.environment.tasks("train")[:4], samples_per_prompt=1)
    whole = [group for group in groups if group.trajectories[0].stop.value == "terminated"]
    write_trajectories(tmp_path / "e.jsonl", whole)
    found = demonstrations(rollout, tmp_path / "e.jsonl", episodes=9)([])
    assert len(whole) > 0 and {group.task.id: group.trajectories[0].reward for group in found} == {
        group.task.id: group.trajectories[0].reward for group in whole
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no episode"),
        ('{"task_id": 3, "turns": []}\n', ":1: expected"),
        ("[" * 3000 + "\n", ":1: expected"),
        ('{"task_id": "train-zz", "turns": [{"response": "a"}]}\n', "found 'train-zz'"),
        (
            '{"task_id": "train-ab", "turns": [{"response": "a"}]}\n',
            ":1: the episode does not end with its last response",
        ),
    ],
)
def test_a_file_that_is_none_is_told_in_one_line(
    rollout: Rollout, tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said) as raised:
        demonstrations(rollout, path)([])
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="cannot be read"):
        demonstrations(rollout, tmp_path / "nothing.jsonl")


def test_likelihood_is_of_the_demonstrations_and_the_policy_gradient_of_the_rest(
    rollout: Rollout, tmp_path: Path
) -> None:
    own = rollout.collect(rollout.environment.tasks("train")[:2])
    step = demonstrations(rollout, recorded(tmp_path / "d.jsonl", "abab"))(own)
    batch = make_batch([one for group in step for one in group.usable])
    loss, _ = SFTLoss(source="demonstration")(
        PolicyOutput(torch.full(batch.tokens.shape, -2.0)), batch
    )
    assert loss[:-1].eq(0).all() and loss[-1].tolist() == [
        2.0 * on for on in batch.loss_mask[-1].tolist()
    ]
    kept = OnlySources()(batch).coefficients
    assert kept is not None and kept[:-1].eq(1).all() and kept[-1].eq(0).all()
    both = OnlySources(["local", "demonstration"])(
        batch.replace(coefficients=torch.full(batch.tokens.shape, 0.5))
    )
    assert both.coefficients is not None and both.coefficients.eq(0.5).all()
