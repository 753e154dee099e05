"""The steps of an asynchronous run over a real rollout: those of the synchronous one where nothing runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from benchmarks.sleeping import FIRST_WEIGHTS, FakeEngine
from rlflow.errors import RolloutError
from rlflow.rollout import Rollout, Tokenizer
from rlflow.run.asynchronous import GroupsAhead, Terms
from rlflow.run.journal import AttemptJournal
from rlflow.run.pacing import Pacing
from rlflow.types import Group
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.test_submission import Counting
from tests.unit.run.simulation import Tasks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2"))


def over(tokenizer: Tokenizer, environment: Asking) -> Rollout:
    return Rollout(
        FakeEngine(tokenizer, max_concurrency=4), environment, tokenizer, samples_per_prompt=2, max_response_tokens=12
    )


def every_other(groups: list[Group]) -> list[Group]:
    """A filter that has a memory of its own: it refuses every third group it is shown."""
    return [group for group in groups if not group.task.id.endswith(("2", "5", "8"))]


def ahead_of(rollout: Rollout, path: Path, source: Any, pacing: Pacing, **terms: Any) -> GroupsAhead:
    known = {"samples": 2, "steps": 100, "lease_s": 20.0, "max_aborted_share": 0.0, **terms}
    ahead = GroupsAhead(AttemptJournal(path), rollout.flow(), rollout.attempt, source, [], pacing, Terms(**known))
    ahead.recover(0)
    return ahead


COLUMNS = ("tokens", "loss_mask", "logprobs", "versions")


def facts(steps: Sequence[Sequence[Group]]) -> list[Any]:
    """Everything about the groups but times: also who they are, in which order, and with which statistics."""
    return [
        [
            (group.id, group.task.id, one.id, one.reward, one.rewards, one.group_stats, one.stop, one.metrics, one.prompt,
             [(turn.response, turn.observation, turn.reward) for turn in one.turns],
             [tuple(getattr(part, name).tolist() for name in COLUMNS) for part in one.segments])
            for group in groups for one in group.trajectories
        ]
        for groups in steps
    ]  # fmt: skip


def test_with_both_keys_at_zero_the_steps_are_those_of_the_synchronous_stream(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with over(tokenizer, Asking(turns=2)) as rollout:
        stream, expected = rollout.stream(Counting(22), 4, admit=every_other), []
        for version, groups in enumerate(stream, start=1):
            expected.append(groups)
            rollout.load_weights(FIRST_WEIGHTS.items(), version)
    with over(tokenizer, Asking(turns=2)) as rollout:
        ahead = ahead_of(rollout, tmp_path / "journal.sqlite", Counting(22), Pacing(4))
        found = []
        for version, groups in enumerate(ahead.steps(0, every_other), start=1):
            found.append(groups)
            rollout.pause("keep")
            rollout.load_weights(FIRST_WEIGHTS.items(), version)
        ahead.close()
    assert len(expected) == 4 and facts(found) == facts(expected)


def test_groups_run_ahead_of_the_step_but_no_further_than_they_may(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        source = Counting()
        ahead = ahead_of(rollout, tmp_path / "journal.sqlite", source, Pacing(3, 2, 1))
        for step in range(4):
            groups = ahead.take(step, list)
            lags = [step - int(version) for group in groups for one in group.trajectories
                    for version in one.segments[0].versions[one.segments[0].loss_mask]]  # fmt: skip
            assert len(groups) == 3 and min(lags) >= 0 and max(lags) <= 2
            assert source.position == 3 * (step + 2)  # this step, and one beyond
            rollout.load_weights(FIRST_WEIGHTS.items(), step + 1)
        ahead.close()


def test_nothing_is_issued_beyond_the_last_step(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        source = Counting()
        ahead = ahead_of(rollout, tmp_path / "journal.sqlite", source, Pacing(2, 4, 4), steps=3)
        assert [len(ahead.take(step, list)) for step in range(3)] == [2, 2, 2] and source.position == 6
        ahead.close()


def test_too_many_aborted_attempts_stop_the_run_and_the_first_error_is_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    class Failing(Asking):
        async def step(self, episode: Any, response: str) -> Any:
            raise ValueError("the tool broke")

    with over(tokenizer, Failing()) as rollout:
        ahead = ahead_of(rollout, tmp_path / "journal.sqlite", Counting(), Pacing(2, 1, 1))
        with pytest.raises(
            RolloutError, match=r"4 of 4 episodes were aborted, more than max_aborted_share=0\.0.*the tool broke"
        ):
            ahead.take(0, list)
        ahead.close()


def test_filters_that_let_nothing_through_stop_the_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        ahead = ahead_of(rollout, tmp_path / "journal.sqlite", Counting(), Pacing(2, 1, 1), max_rounds=3)
        with pytest.raises(RolloutError, match="step 0: not one of 6 groups was admitted, in 3 rounds"):
            ahead.take(0, lambda groups: [])
        ahead.close()


def test_a_source_that_names_other_tasks_after_a_restart_is_followed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its decisions depend on what it was told of, which the checkpoint took back."""
    with over(tokenizer, Asking(turns=1)) as rollout:
        first = ahead_of(rollout, tmp_path / "journal.sqlite", Counting(), Pacing(2, 1, 1))
        first.take(0, list)
        first.close()
        other = Tasks(10)  # t0, t1, ... in place of c0, c1, ...
        again = ahead_of(rollout, tmp_path / "journal.sqlite", other, Pacing(2, 1, 1))
        groups = again.take(0, list)
        assert [group.id for group in groups] == ["0:t0", "0:t1"]
        assert again.journal.issued() == 4 and torch.equal(groups[0].trajectories[0].segments[0].tokens[:1], torch.tensor(
            rollout.prompt_tokens(other.tasks[0])[:1]))  # fmt: skip
        again.close()
