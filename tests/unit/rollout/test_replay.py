"""Episodes played again from their text: the same as if they had been sampled here, and nothing that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlflow.errors import EnvironmentContractError
from rlflow.rollout import Response, Rollout, Transcripts, transcribe
from rlflow.types import Episode, Step, StopReason, Task
from tests.flow.letters import Letters
from tests.unit.environments.swarm.peers import WORDS, letters_rollout, said

OTHER_WORDS = tuple(reversed(WORDS))
"""The same letters under other numbers."""


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    with letters_rollout() as made:
        yield made


def test_a_transcript_of_ones_own_episodes_gives_them_again(rollout: Rollout) -> None:
    groups = rollout.collect(rollout.environment.tasks("train")[:12], samples_per_prompt=4)
    again = rollout.replay(
        {group.id: transcribe(group, rollout.tokenizer.eos_ids) for group in groups}
    )
    compared = 0
    for group, other in zip(groups, again, strict=True):
        assert other.id == group.id and len(other.trajectories) <= len(group.trajectories)
        for one in other.trajectories:
            mine = group.trajectories[one.attempt]
            assert (one.reward, one.prompt, one.source) == (mine.reward, mine.prompt, "external")
            assert [turn.response for turn in one.turns] == [turn.response for turn in mine.turns]
            if torch.equal(
                one.segments[0].tokens, mine.segments[0].tokens
            ):  # no padding token was sampled, which has no text
                compared += 1
                assert torch.equal(one.segments[0].loss_mask, mine.segments[0].loss_mask)
                assert one.segments[0].logprobs is None and set(
                    one.segments[0].versions.tolist()
                ) == {-1}
                assert one.stop is mine.stop
    assert compared > 12


def test_another_tokenizer_says_the_same_and_the_loss_mask_is_on_exactly_the_responses() -> None:
    with letters_rollout(words=OTHER_WORDS) as there:
        (group,) = there.replay({"g": said("train-ab", "ab", "ac", "cb")})
    assert [one.reward for one in group.trajectories] == [1.0, 0.5, 0.5]
    assert group.trajectories[0].group_stats == (
        3,
        pytest.approx(2 / 3),
        pytest.approx((1 / 12) ** 0.5),
    )
    for one, responses in zip(group.trajectories, ("ab", "ac", "cb"), strict=True):
        (segment,) = one.segments
        assert there.tokenizer.decode(segment.tokens[segment.loss_mask]) == responses
        assert there.tokenizer.decode(segment.tokens) == f"a?{responses[0]}|b?{responses[1]}"
        assert segment.tokens.tolist() == [
            OTHER_WORDS.index(word) for word in f"a?{responses[0]}|b?{responses[1]}"
        ]


def test_an_end_of_sequence_is_the_local_one_and_a_limit_ends_an_episode(rollout: Rollout) -> None:
    both, cut = (Response("a", "eos"), Response("b", "eos")), (Response("a", "length"),)
    turns = (both, cut, (Response("", "eos"), Response("b", "stop")))
    (group,) = rollout.replay({"g": Transcripts(said("train-ab", "ab").task, turns)})
    assert [rollout.tokenizer.decode(one.segments[0].tokens, False) for one in group.trajectories] == [
        "a?a<end>|b?b<end>", "a?a", "a?<end>|b?b"
    ]  # fmt: skip
    assert [one.stop for one in group.trajectories] == [
        StopReason.TERMINATED,
        StopReason.MAX_TOKENS,
        StopReason.TERMINATED,
    ]
    assert [one.reward for one in group.trajectories] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    "attempt",
    ["a", "abc", "ä", "aä", ""],
    ids=["too few", "too many", "unknown", "unknown later", "none"],
)
def test_what_cannot_be_played_is_left_out_and_costs_the_others_nothing(
    rollout: Rollout, attempt: str
) -> None:
    (group,) = rollout.replay({"g": said("train-ab", "ab", attempt, "cb")})
    assert [one.attempt for one in group.trajectories] == [0, 2] and group.trajectories[
        0
    ].group_stats[:2] == (2, 0.75)


def test_a_response_over_the_limit_is_left_out(rollout: Rollout) -> None:
    long = Transcripts(
        said("train-ab", "ab").task, ((Response("abc", "stop"), Response("b", "stop")),)
    )
    assert rollout.replay({"g": long})[0].trajectories == []


class Strict(Letters):
    """Breaks the contract, or fails, at what some tasks hold."""

    async def step(self, episode: Episode, response: str) -> Step:
        if episode.task.answer == "contract":
            raise EnvironmentContractError("not with me")
        if episode.task.answer == "nan":
            return Step(reward=float("nan"))
        return await super().step(episode, response)


@pytest.mark.parametrize("answer", ["contract", "nan", 7, None])
def test_a_task_that_breaks_the_environment_costs_its_own_group_only(answer: Any) -> None:
    with letters_rollout(Strict()) as made:
        hostile = Transcripts(Task("x", "a?", answer), said("train-ab", "ab", "ac").attempts)
        groups = made.replay(
            {"one": said("train-ab", "ab", "ac"), "two": hostile, "three": said("train-cd", "cd")}
        )
        assert [len(group.trajectories) for group in groups] == [2, 0, 1]
        assert len(made.collect(made.environment.tasks("train")[:1])) == 1  # and sampling goes on
