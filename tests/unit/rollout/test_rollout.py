"""What an episode becomes: exact tokens, groups, limits, and what a broken environment costs."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.config.schema import load_config
from rlflow.errors import EnvironmentContractError, RolloutError
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.run.assemble import fitting_tasks, make_rollout
from rlflow.types import Episode, Step, StopReason, Task
from tests.unit.rollout.asking import OBSERVATION, Asking, all_trajectories, make


def test_segments_are_exactly_what_the_engine_was_fed_and_sampled(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    calls: dict[str, list[Any]] = {}
    for request_id, tokens, _, completion in rollout.engines[0].calls:
        calls.setdefault(request_id.split("/", 2)[2], []).append((tokens, completion))
    assert len(calls) == len(trajectories) == 16
    by_attempt = {f"{t.group_id}/{index % 4}": t for index, t in enumerate(trajectories)}
    for name, turns in calls.items():
        (segment,) = by_attempt[name].segments
        mask = torch.zeros(len(segment), dtype=torch.bool)
        for tokens, completion in turns:
            start, stop = len(tokens), len(tokens) + len(completion.tokens)
            assert segment.tokens[:stop].tolist() == tokens + completion.tokens
            assert segment.logprobs[start:stop].tolist() == pytest.approx(completion.logprobs)
            mask[start:stop] = True
        assert torch.equal(segment.loss_mask, mask)
        assert torch.equal(segment.versions, torch.where(mask, 0, -1))
        assert not segment.logprobs[~mask].any()
        last_tokens, last = turns[-1]
        assert len(segment) == len(last_tokens) + len(last.tokens)


def test_named_rewards_add_up_and_are_stamped_on_the_whole_group(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("train"))
    for group in groups:
        assert all(
            one.rewards["vowels"] == pytest.approx(one.reward) for one in group.usable
        )  # the reward, once more by name
        assert all(
            one.rewards_stats["vowels"] == pytest.approx(one.group_stats[1:])
            for one in group.usable
        )
        finished = [float(one.stop is StopReason.TERMINATED) for one in group.usable]
        assert [one.rewards.get("patience", 0.0) for one in group.usable] == finished
        if any(finished):
            found = statistics.fmean(finished), statistics.stdev(finished)
            assert all(
                one.rewards_stats["patience"] == pytest.approx(found) for one in group.usable
            )
    assert any(trajectory.rewards for trajectory in all_trajectories(groups))


@pytest.mark.parametrize("value", [float("nan"), 1e19])
def test_a_named_reward_that_is_no_reward_stops_the_collection(
    qwen: Path, tokenizer: Tokenizer, value: float
) -> None:
    class Odd(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            return Step("", 0.0, True, rewards={"style": value})

    expected = "rewards: expected names with finite numbers, .* found 'style'"
    with (
        make(qwen, tokenizer, Odd()) as rollout,
        pytest.raises(EnvironmentContractError, match=expected),
    ):
        rollout.collect(Odd().tasks("train"))


def test_environment_tokens_are_outside_the_mask_and_decode_to_what_was_said(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    seen = Counter(t.stop for t in trajectories)
    assert seen[StopReason.TERMINATED] > 8
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        pieces = [trajectory.prompt]
        for number, turn in enumerate(trajectory.turns):
            assert segment.loss_mask[turn.start : turn.stop].all()
            assert (
                tokenizer.decode(segment.tokens[turn.start : turn.stop].tolist()) == turn.response
            )
            end = (
                trajectory.turns[number + 1].start
                if number + 1 < len(trajectory.turns)
                else len(segment)
            )
            between = segment.tokens[turn.stop : end].tolist()
            assert between == (tokenizer.encode(OBSERVATION) if end > turn.stop else [])
            pieces.append(turn.response)
        assert segment.tokens[: trajectory.turns[0].start].tolist() == tokenizer.encode(pieces[0])
        assert trajectory.metrics["turns"] == len(trajectory.turns)
        assert trajectory.metrics["response_tokens"] == int(segment.loss_mask.sum())
        observed = len(segment) - int(segment.loss_mask.sum()) - trajectory.turns[0].start
        assert trajectory.metrics["observation_tokens"] == observed
        assert trajectory.reward == pytest.approx(sum(turn.reward for turn in trajectory.turns))


def test_groups_carry_the_statistics_of_their_usable_attempts(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class OneFails(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if episode is self.episodes[1]:
                raise ConnectionError("search server gone")
            return await super().step(episode, response)

    environment = OneFails()
    with make(qwen, tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("train"), step=7)
    assert [group.id for group in groups] == ["7:t0", "7:t1", "7:t2", "7:t3"]
    assert [len(group.usable) for group in groups] == [3, 4, 4, 4]
    aborted = groups[0].trajectories[1]
    assert aborted.stop is StopReason.ABORTED
    place = rf"{re.escape(__file__)}:\d+ in step"
    assert re.fullmatch(
        rf"ConnectionError: search server gone \({place}; the response was '.*'\)", aborted.error
    )
    assert aborted.group_stats is None
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.usable]
        expected = (len(rewards), statistics.fmean(rewards), statistics.stdev(rewards))
        assert all(trajectory.group_stats == pytest.approx(expected) for trajectory in group.usable)


def test_close_is_called_once_per_episode_whatever_happens(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class Flaky(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if self.episodes.index(episode) % 3 == 0:
                raise ValueError("no")
            return await super().step(episode, response)

    environment = Flaky()
    with make(qwen, tokenizer, environment, max_aborted_share=1.0) as rollout:
        rollout.collect(environment.tasks("train"))
    assert sorted(environment.closed.values()) == [1] * 16


def test_too_many_aborted_episodes_stop_the_run_and_name_the_first_error(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class Broken(Asking):
        def step(self, episode: Episode, response: str) -> Step:
            raise TimeoutError("no answer in 10 s")

    environment = Broken()
    with make(qwen, tokenizer, environment) as rollout:
        with pytest.raises(
            RolloutError, match=r"16 of 16 .* task 't0': TimeoutError: no answer in 10 s"
        ):
            rollout.collect(environment.tasks("train"))
        groups = rollout.collect(environment.tasks("train"), max_aborted_share=1.0)
    assert not any(group.usable for group in groups)


@pytest.mark.parametrize(
    "result, message",
    [
        ("text", r"step: expected an rlflow\.Step, found str"),
        (Step(reward=float("nan")), "reward: expected a finite number, found nan"),
        (Step(reward=-1e300), r"reward: expected at most 1e\+18 either way, found -1e\+300"),
    ],
)
def test_a_broken_contract_is_an_error_of_its_own(
    qwen: Path, tokenizer: Tokenizer, result: Any, message: str
) -> None:
    class Wrong(Asking):
        def step(self, episode: Episode, response: str) -> Any:
            return result

    with (
        make(qwen, tokenizer, Wrong()) as rollout,
        pytest.raises(EnvironmentContractError, match=message),
    ):
        rollout.collect(Wrong().tasks("train"))


def test_plain_methods_run_in_threads_and_give_what_async_ones_give(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    threads: set[str] = set()

    class Plain(Asking):
        def reset(self, task: Task) -> Episode:
            return Episode(task)

        def step(self, episode: Episode, response: str) -> Step:
            threads.add(threading.current_thread().name)
            time.sleep(0.001)
            return asyncio.run(Asking.step(self, episode, response))

        def close(self, episode: Episode) -> None:
            self.closed[id(episode)] += 1

    results = []
    for environment in (Plain(), Asking()):
        with make(qwen, tokenizer, environment) as rollout:
            results.append(
                [
                    t.segments[0].tokens.tolist()
                    for t in all_trajectories(rollout.collect(environment.tasks("")))
                ]
            )
    assert results[0] == results[1]
    assert threads and all(name.startswith("rlflow-environment") for name in threads)


def test_it_works_inside_a_running_event_loop_and_from_several_in_turn(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:

        async def cell() -> list[list[int]]:
            groups = rollout.collect(
                environment.tasks(""), step=-1
            )  # an evaluation: the same samples each time
            return [t.segments[0].tokens.tolist() for t in all_trajectories(groups)]

        assert asyncio.run(cell()) == asyncio.run(cell())


def test_greedy_collection_for_evaluation(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("val"), samples_per_prompt=2, temperature=0.0)
    for group in groups:
        first, second = group.trajectories
        assert first.segments[0].tokens.tolist() == second.segments[0].tokens.tolist()
        assert first.temperature == 1.0  # what the log-probs are at


def test_the_turn_limit_still_scores_the_last_response(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(turns=10)
    with make(qwen, tokenizer, environment, max_turns=2) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    limited = [t for t in trajectories if t.stop is StopReason.MAX_TURNS]
    assert len(limited) > 8
    for trajectory in limited:
        assert len(trajectory.turns) == 2
        assert trajectory.metrics["searches"] == 2.0  # the environment saw the second response
        assert (
            len(trajectory.segments[0]) == trajectory.turns[-1].stop
        )  # but its answer was not appended


def test_a_response_that_fills_its_budget_truncates_the_episode(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    environment.stop = ()
    with make(qwen, tokenizer, environment, max_response_tokens=3) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    for trajectory in trajectories:
        ended = int(trajectory.segments[0].tokens[-1]) in tokenizer.eos_ids
        assert ended or (
            trajectory.stop is StopReason.MAX_TOKENS and trajectory.metrics["response_tokens"] == 3
        )


def test_an_episode_never_exceeds_its_total_budget(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(turns=10)
    prompt = len(tokenizer.encode(environment.tasks("")[0].prompt))
    observation = len(tokenizer.encode(OBSERVATION))
    with make(qwen, tokenizer, environment, max_total_tokens=prompt + observation + 5) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
        assert all(t.stop is StopReason.MAX_TOKENS for t in trajectories)
        assert max(len(t.segments[0]) for t in trajectories) <= prompt + observation + 5
        assert {len(t.turns) for t in trajectories} == {1, 2}
        for trajectory in trajectories:  # an observation is appended whole or not at all
            assert trajectory.metrics["observation_tokens"] == observation * (
                len(trajectory.turns) - 1
            )
            assert bool(trajectory.segments[0].loss_mask[-1])


def test_a_prompt_beyond_the_budget_makes_no_longer_row(qwen: Path, tokenizer: Tokenizer) -> None:
    class Growing(Asking):
        async def reset(self, task: Task) -> Episode:
            return Episode(dataclasses.replace(task, prompt=task.prompt * 50))

    environment = Growing()
    with make(qwen, tokenizer, environment, max_total_tokens=64) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    whole = tokenizer.encode(environment.tasks("train")[0].prompt * 50)
    for one in trajectories:
        assert one.stop is StopReason.MAX_TOKENS and not one.turns
        assert len(one.segments[0]) == 64 and one.segments[0].tokens[0] == whole[0]


def test_long_observations_are_cut_and_counted(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(turns=2)
    with make(qwen, tokenizer, environment, max_observation_tokens=5) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    cut = [t for t in trajectories if len(t.turns) == 2]
    assert len(cut) > 8
    for trajectory in cut:
        first, second = trajectory.turns
        between = trajectory.segments[0].tokens[first.stop : second.start].tolist()
        assert between == tokenizer.encode(OBSERVATION)[:5]
        assert trajectory.metrics["observations_cut"] == 1.0


def test_messages_go_through_the_chat_template(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(turns=2, observation=[{"role": "user", "content": "Doc 1"}])
    with make(qwen, tokenizer, environment, chat_template=True) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    for trajectory in (t for t in trajectories if len(t.turns) == 2):
        first, second = trajectory.turns
        tokens = trajectory.segments[0].tokens
        between = tokenizer.decode(
            tokens[first.stop : second.start].tolist(), skip_special_tokens=False
        )
        start = "" if int(tokens[first.stop - 1]) in tokenizer.eos_ids else "<|im_end|>"
        assert between == f"{start}\n<|im_start|>user\nDoc 1<|im_end|>\n<|im_start|>assistant\n"


def test_messages_need_a_conversation(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(observation=[{"role": "user", "content": "Doc 1"}])
    with (
        make(qwen, tokenizer, environment) as rollout,
        pytest.raises(EnvironmentContractError, match="plain text"),
    ):
        rollout.collect(environment.tasks("train"))


def test_a_step_can_set_the_stop_strings_of_the_next_turn(qwen: Path, tokenizer: Tokenizer) -> None:
    class Switching(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            return Step(OBSERVATION, stop=("e",) if episode.turns == 1 else None)

    environment = Switching()
    with make(qwen, tokenizer, environment) as rollout:
        rollout.collect(environment.tasks("train")[:1], samples_per_prompt=8)
    turns: dict[str, list[tuple[str, ...]]] = {}
    for request_id, _, sampling, _ in rollout.engines[0].calls:
        turns.setdefault(request_id, []).append(sampling.stop)
    assert max(map(len, turns.values())) >= 3
    for stops in turns.values():
        assert stops == [Asking.stop, ("e",), Asking.stop, Asking.stop][: len(stops)]


def test_a_rewritten_observation_starts_a_segment_that_trains_later_turns_only(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class Rewriting(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            step = await super().step(episode, response)
            step.replace = {0: "page 2"} if episode.turns == 2 else None
            return step

    environment = Rewriting()
    with make(qwen, tokenizer, environment) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    rewritten = [t for t in trajectories if len(t.turns) == 3]
    assert len(rewritten) > 4
    for trajectory in rewritten:
        before, after = trajectory.segments
        trained = [
            t
            for turn in trajectory.turns
            for t in trajectory.segments[turn.segment].tokens[turn.start : turn.stop]
        ]
        assert len(trained) == int(before.loss_mask.sum() + after.loss_mask.sum())
        assert [turn.segment for turn in trajectory.turns] == [0, 0, 1]
        text = tokenizer.decode(after.tokens.tolist())
        assert "page 2" in text and text.count("Orvan Telmik") == 1


def test_a_prompt_that_reset_changes_is_the_one_on_record(qwen: Path, tokenizer: Tokenizer) -> None:
    class Rewording(Asking):
        async def reset(self, task: Task) -> Episode:
            return Episode(dataclasses.replace(task, prompt="Another question? "))

    environment = Rewording()
    with make(qwen, tokenizer, environment) as rollout:
        for trajectory in all_trajectories(rollout.collect(environment.tasks("train")[:1])):
            assert trajectory.prompt == "Another question? "
            start = trajectory.turns[0].start
            assert (
                tokenizer.decode(trajectory.segments[0].tokens[:start].tolist())
                == trajectory.prompt
            )


def test_the_token_budget_is_that_of_the_engine_where_it_is_smaller(
    qwen: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts that would not fit are dropped and counted, not played to an end without a turn; and the run says so."""
    question = "Question 0: who wrote it?"
    longest = len(tokenizer.encode(question)) + 1
    with Rollout(
        EmbeddedEngine(qwen, tokenizer, max_tokens=longest), Asking(), tokenizer
    ) as rollout:
        assert rollout.max_total_tokens == longest
    config = load_config(None, [f"model.path={qwen}", f"rollout.engine.max_tokens={longest}",
                                f"environment={{name: '{__file__}:LongAndShort'}}"])  # fmt: skip
    with make_rollout(config) as rollout:
        kept, dropped = fitting_tasks(rollout, "train", config.data.max_prompt_tokens)
    assert ([task.id for task in kept], dropped) == (["short"], 1)
    assert f"the engine holds {longest} tokens: episodes end there" in caplog.text


class LongAndShort(Asking):
    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task("long", "Question 0: who wrote it? Who?"),
            Task("short", "Question 0: who wrote it?"),
        ]
