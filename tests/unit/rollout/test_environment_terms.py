"""Claims about what an environment and a rollout tell each other: limits, cuts, frames, tools, reports."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from benchmarks.sleeping import FakeEngine
from rlflow.algorithms.advantages.gae import GAE
from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.filters.overlong_filter import OverlongFilter
from rlflow.batching import make_batch
from rlflow.environment import check_step
from rlflow.errors import ConfigError, EnvironmentContractError, ModelError, RolloutError
from rlflow.report.reductions import rollout_metrics
from rlflow.rollout import Rollout, Tokenizer
from rlflow.types import Episode, Group, Step, StopReason
from tests.unit.rollout.asking import OBSERVATION, Asking, all_trajectories, make
from tests.waiting import until


class Listening(Asking):
    """Writes down what it is told about each response: (episode, turn, responses left, cut)."""

    def __init__(self, turns: int = 99) -> None:
        super().__init__(turns)
        self.told: list[tuple[int, int, int | None, bool]] = []

    async def step(self, episode: Episode, response: str) -> Step:
        self.told.append((id(episode), episode.turns, episode.turns_left, episode.cut))
        return await super().step(episode, response)


def test_an_episode_knows_how_many_responses_may_follow(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Listening()
    with make(qwen, tokenizer, environment, max_turns=3) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    assert {(turn, left) for _, turn, left, cut in environment.told if not cut} == {
        (1, 2),
        (2, 1),
        (3, 0),
    }
    cut = [left for _, _, left, cut in environment.told if cut]
    assert len(cut) == sum(
        trajectory.stop is StopReason.MAX_TOKENS for trajectory in trajectories
    ) and not any(cut)


def test_a_response_that_a_token_limit_ends_is_cut_and_the_last(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Listening()
    environment.stop = ()
    with make(qwen, tokenizer, environment, max_turns=3, max_response_tokens=2) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    assert sum(trajectory.stop is StopReason.MAX_TOKENS for trajectory in trajectories) > 8
    told = {episode: (left, cut) for episode, _, left, cut in environment.told}
    assert sum(cut for _, cut in told.values()) == sum(
        trajectory.stop is StopReason.MAX_TOKENS for trajectory in trajectories
    )
    assert all(left == 0 for left, cut in told.values() if cut)


def test_an_environments_turn_limit_takes_the_place_of_the_rollouts(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Listening()
    environment.max_turns = 2
    with make(qwen, tokenizer, environment, max_turns=9) as rollout:
        assert rollout.response_budget == 2 * 40
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    assert max(len(trajectory.turns) for trajectory in trajectories) == 2
    assert {trajectory.stop for trajectory in trajectories} <= {
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
    }


def test_a_cut_observation_keeps_the_end_of_its_frame(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    environment.frame = ("\n\n<information>", "</information>\n\n")
    whole = len(tokenizer.encode(OBSERVATION))
    with make(qwen, tokenizer, environment, max_observation_tokens=whole - 5) as rollout:
        for trajectory in all_trajectories(rollout.collect(environment.tasks("train"))):
            for turn, following in zip(trajectory.turns, trajectory.turns[1:]):
                shown = trajectory.segments[0].tokens[turn.stop : following.start].tolist()
                text = tokenizer.decode(shown)
                assert (
                    len(shown) <= whole - 5
                    and text.endswith("</information>\n\n")
                    and text != OBSERVATION
                )


def test_a_limit_below_the_frame_is_an_error_at_the_start(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    environment.frame = ("\n\n<information>", "</information>\n\n")
    needed = sum(len(tokenizer.encode(part)) for part in environment.frame)
    with pytest.raises(ConfigError, match=f"alone takes {needed}"):
        make(qwen, tokenizer, environment, max_observation_tokens=needed)
    make(qwen, tokenizer, environment, max_observation_tokens=needed + 1).close()


def test_tools_need_a_template_that_presents_them(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    environment.tools = ({"type": "function", "function": {"name": "look"}},)
    with pytest.raises(ModelError, match="no place for them"):
        make(qwen, tokenizer, environment)


def test_a_group_reduced_to_one_usable_attempt_has_advantage_zero(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class Failing(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if episode.task.id == "t0" and episode is not next(
                other for other in self.episodes if other.task.id == "t0"
            ):
                raise OSError("the search failed")
            return Step("", float(len(response)), True)

    environment = Failing()
    with make(qwen, tokenizer, environment, max_aborted_share=0.9) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    assert [len(group.usable) for group in groups] == [1, 4]
    batch = make_batch([trajectory for group in groups for trajectory in group.trajectories])
    advantages = grpo(batch)
    assert len(batch) == 5 and advantages[0] == 0.0 and float(batch.rewards[0]) > 0
    assert advantages[1:].abs().max() > 0


def test_a_report_is_taken_once_per_collection(qwen: Path, tokenizer: Tokenizer) -> None:
    class Reporting(Asking):
        def report(self) -> dict[str, float]:
            count, self.episodes = float(len(self.episodes)), []
            return {"mine/episodes": count}

    environment = Reporting()
    with make(qwen, tokenizer, environment) as rollout:
        for count in (4, 2):
            rollout.collect(environment.tasks("train")[:count])
            assert rollout.report == {"mine/episodes": 4.0 * count}


@pytest.mark.parametrize(
    ("replace", "found"),
    [
        ({-1: "x"}, "-1: str"),  # not the prompt
        ({7: "x"}, "7: str"),
        ({1: "x"}, "1: str"),  # the answer itself says what this turn reads
        ({True: "x"}, "True: str"),
        ({"0": "x"}, "'0': str"),
        ({0: None}, "0: NoneType"),
        ("at the first turn", "0: str"),
    ],
)
def test_only_observations_of_earlier_turns_can_be_replaced(
    qwen: Path, tokenizer: Tokenizer, replace: dict[int, str] | str, found: str
) -> None:
    first = isinstance(replace, str)
    rewritten = {0: "x"} if first else replace

    class Rewriting(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            return Step(OBSERVATION, replace=rewritten if first or episode.turns == 2 else None)

    message = (
        rf"Rewriting\.step: replace: .* of the {0 if first else 1} turns before, .* found {found}"
    )

    environment = Rewriting()
    with (
        make(qwen, tokenizer, environment, samples_per_prompt=8) as rollout,
        pytest.raises(EnvironmentContractError, match=message),
    ):
        rollout.collect(environment.tasks("train")[:1])


class AnsweredOnce(Asking):
    """Takes the first response as the answer, whole or not: a single turn, as of most tasks with a verifier."""

    stop = ()

    async def step(self, episode: Episode, response: str) -> Step:
        return Step("", 1.0, True)


@pytest.fixture
def cut_and_whole(tokenizer: Tokenizer) -> list[Group]:
    """A group of each task, in which some answers came to their end and some were cut."""
    words = ["no", "so on and so on and so on and so on"]
    with Rollout(
        FakeEngine(tokenizer, responses=words), AnsweredOnce(), tokenizer, max_response_tokens=6
    ) as rollout:
        groups = rollout.collect(rollout.environment.tasks("train"))
    found = [one for group in groups for one in group.trajectories]
    assert {one.metrics["responses_cut"] for one in found} == {0.0, 1.0} and {
        one.reward for one in found
    } == {1.0}
    assert all(
        (one.stop is StopReason.MAX_TOKENS) == bool(one.metrics["responses_cut"]) for one in found
    )
    return groups


def test_overlong_filter_masks_cut_answers_of_a_single_turn(cut_and_whole: list[Group]) -> None:
    overlong = OverlongFilter()
    for group in overlong(cut_and_whole):
        for one in group.trajectories:
            assert bool(one.segments[0].loss_mask.any()) != bool(one.metrics["responses_cut"])
    cut = sum(one.metrics["responses_cut"] for group in cut_and_whole for one in group.trajectories)
    assert overlong.report() == {"attempts_masked": cut}


def test_the_share_of_cut_answers_of_a_single_turn_is_told(cut_and_whole: list[Group]) -> None:
    found = [one for group in cut_and_whole for one in group.trajectories]
    share = sum(one.metrics["responses_cut"] for one in found) / len(found)
    assert rollout_metrics(found, {})["rollout/truncated_max_tokens"] == pytest.approx(share)


def test_gae_goes_on_with_the_critics_value_after_a_cut_answer_of_a_single_turn(
    cut_and_whole: list[Group],
) -> None:
    found = [one for group in cut_and_whole for one in group.trajectories]
    batch = make_batch(found)
    batch = batch.replace(
        values=torch.zeros(batch.tokens.shape), final_values=torch.full((len(batch),), 5.0)
    )
    _, returns = GAE(bootstrap=True, whiten=False)(batch)
    last = [float(row[mask][-1]) for row, mask in zip(returns, batch.loss_mask, strict=True)]
    assert last == [6.0 if one.metrics["responses_cut"] else 1.0 for one in found]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(reward=None), "reward: expected a finite number, found None"),
        (Step(None), "observation must be text or a list of messages, found NoneType"),
        (
            Step([{"role": "user"}]),
            "observation has a message without role and content: {'role': 'user'}",
        ),
        (Step(metrics=None), "metrics: expected {name: number}, found None"),
        (Step(rewards=None), "rewards: expected {name: number}, found None"),
        (Step(picture=None), "picture: expected text, found NoneType"),
        (
            Step(metrics={"f1": None}),
            "metrics: expected names with finite numbers, found 'f1': None",
        ),
        (Step(replace=[1]), "replace: expected {turn: text}, found [1]"),
        (Step(after="x"), "after: expected a whole number or None, found 'x'"),
        (Step(max_tokens="3"), "max_tokens: expected a whole number or None, found '3'"),
        (Step(max_tokens=-3), "max_tokens: expected at least 0 (no limit of its own), found -3"),
        (Step(waited_s=None), "waited_s: expected a finite number, found None"),
        (
            Step(stop="</a>"),
            "stop: expected a tuple of non-empty strings, found '</a>'; write ('</a>',) with its comma",
        ),
        (Step(stop=("",)), "stop: expected a tuple of non-empty strings, found ('',)"),
    ],
)
def test_a_step_with_a_fault_is_told_in_one_line(step: Step, message: str) -> None:
    with pytest.raises(EnvironmentContractError) as caught:
        check_step(Asking(), step, 0)
    assert str(caught.value) == f"Asking.step: {message}."


@pytest.mark.parametrize("reward", [numpy.float32(0.5), numpy.int64(1), torch.tensor(0.5), True])
def test_numbers_of_other_libraries_are_rewards(reward: Any) -> None:
    check_step(Asking(), Step(reward=reward, rewards={"style": reward}), 0)


def test_a_text_in_place_of_stop_strings_is_refused(tokenizer: Tokenizer) -> None:
    class Forgotten(Asking):
        stop = "</answer>"  # no comma  # type: ignore[assignment]

    with pytest.raises(
        ConfigError, match=r"environment Forgotten: stop: .* write \('</answer>',\) with its comma"
    ):
        Rollout([], Forgotten(), tokenizer)


def test_every_part_is_closed_whichever_fails_and_nothing_is_collected_afterwards(
    tokenizer: Tokenizer,
) -> None:
    closed: list[str] = []

    class Closing(FakeEngine):
        async def close(self) -> None:
            closed.append("engine")
            raise RuntimeError("the server is gone")

    class Ending(Asking):
        def shutdown(self) -> None:
            closed.append("environment")

    environment, threads = Ending(), threading.active_count()
    rollout = Rollout([Closing(tokenizer), Closing(tokenizer)], environment, tokenizer)
    with pytest.raises(RolloutError, match="expected tasks"):
        rollout.collect(["a?"])  # type: ignore[list-item]
    assert len(rollout.collect(task for task in environment.tasks("train")[:1])) == 1
    with pytest.raises(RuntimeError, match="gone"):
        rollout.close()
    assert closed == ["engine", "engine", "environment"]
    until(lambda: threading.active_count() <= threads)
    with pytest.raises(RolloutError, match="closed"):
        rollout.collect(environment.tasks("train"))
