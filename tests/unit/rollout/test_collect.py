from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.environment import Environment
from rlflow.errors import ConfigError, EnvironmentContractError, RolloutError
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.embedded import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from rlflow.types import Episode, Step, StopReason, Task, Trajectory
from rlflow.weights.hf import iterate_weights

OBSERVATION = "\n\n<information>Doc 1(Title: Orvan Telmik) é☃</information>\n\n"


class Asking(Environment):
    """Answers every response with a text, `turns` times; the reward is the share of vowels. Keeps count of its calls."""

    stop = ("e", "a", "i", "o", " ", "\n", "s", "t")

    def __init__(self, turns: int = 3, observation: Any = OBSERVATION) -> None:
        self.turns = turns
        self.observation = observation
        self.closed: Counter[int] = Counter()
        self.episodes: list[Episode] = []

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"t{index}", f"Question {index}: who wrote it?") for index in range(4)]

    async def reset(self, task: Task) -> Episode:
        episode = Episode(task)
        self.episodes.append(episode)
        return episode

    async def step(self, episode: Episode, response: str) -> Step:
        reward = sum(response.count(vowel) for vowel in "aeiou") / len(response or "x")
        if episode.turns == self.turns:
            return Step("", reward, True, {"answered": 1.0})
        return Step(self.observation, reward, metrics={"answered": 0.0, "searches": float(episode.turns)})

    async def close(self, episode: Episode) -> None:
        self.closed[id(episode)] += 1


class RecordingEngine(EmbeddedEngine):
    """An embedded engine that keeps what it was fed and what it answered."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.calls: list[tuple[str, list[int], Sampling, Completion]] = []

    async def generate(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Completion:
        completion = await super().generate(tokens, sampling, request_id)
        self.calls.append((request_id or "", list(tokens), sampling, completion))
        return completion


@pytest.fixture(scope="module")
def tokenizer(qwen: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(qwen)


def make(path: Path, tokenizer: Tokenizer, environment: Environment, **options: Any) -> Rollout:
    defaults = {"samples_per_prompt": 4, "max_response_tokens": 40, "max_turns": 4}
    return Rollout(RecordingEngine(path, tokenizer), environment, tokenizer, **{**defaults, **options})


def all_trajectories(groups: Sequence[Any]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_segments_are_exactly_what_the_engine_was_fed_and_sampled(qwen: Path, tokenizer: Tokenizer) -> None:
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


def test_environment_tokens_are_outside_the_mask_and_decode_to_what_was_said(qwen: Path, tokenizer: Tokenizer) -> None:
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
            assert tokenizer.decode(segment.tokens[turn.start : turn.stop].tolist()) == turn.response
            end = trajectory.turns[number + 1].start if number + 1 < len(trajectory.turns) else len(segment)
            between = segment.tokens[turn.stop : end].tolist()
            assert between == (tokenizer.encode(OBSERVATION) if end > turn.stop else [])
            pieces.append(turn.response)
        assert segment.tokens[: trajectory.turns[0].start].tolist() == tokenizer.encode(pieces[0])
        assert trajectory.metrics["turns"] == len(trajectory.turns)
        assert trajectory.metrics["response_tokens"] == int(segment.loss_mask.sum())
        observed = len(segment) - int(segment.loss_mask.sum()) - trajectory.turns[0].start
        assert trajectory.metrics["observation_tokens"] == observed
        assert trajectory.reward == pytest.approx(sum(turn.reward for turn in trajectory.turns))


def test_groups_carry_the_statistics_of_their_usable_attempts(qwen: Path, tokenizer: Tokenizer) -> None:
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
    assert (aborted.stop, aborted.error) == (StopReason.ABORTED, "ConnectionError: search server gone")
    assert aborted.group_stats is None
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.usable]
        expected = (len(rewards), statistics.fmean(rewards), statistics.stdev(rewards))
        assert all(trajectory.group_stats == pytest.approx(expected) for trajectory in group.usable)


def test_close_is_called_once_per_episode_whatever_happens(qwen: Path, tokenizer: Tokenizer) -> None:
    class Flaky(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if self.episodes.index(episode) % 3 == 0:
                raise ValueError("no")
            return await super().step(episode, response)

    environment = Flaky()
    with make(qwen, tokenizer, environment, max_aborted_share=1.0) as rollout:
        rollout.collect(environment.tasks("train"))
    assert sorted(environment.closed.values()) == [1] * 16


def test_too_many_aborted_episodes_stop_the_run_and_name_the_first_error(qwen: Path, tokenizer: Tokenizer) -> None:
    class Broken(Asking):
        def step(self, episode: Episode, response: str) -> Step:
            raise TimeoutError("no answer in 10 s")

    environment = Broken()
    with make(qwen, tokenizer, environment) as rollout:
        with pytest.raises(RolloutError, match=r"16 of 16 .* task 't0': TimeoutError: no answer in 10 s"):
            rollout.collect(environment.tasks("train"))
        groups = rollout.collect(environment.tasks("train"), max_aborted_share=1.0)
    assert not any(group.usable for group in groups)


@pytest.mark.parametrize(
    "result, message",
    [("text", "expected a Step as its result, found str"), (Step(reward=float("nan")), "finite reward, found nan")],
)
def test_a_broken_contract_is_an_error_of_its_own(qwen: Path, tokenizer: Tokenizer, result: Any, message: str) -> None:
    class Wrong(Asking):
        def step(self, episode: Episode, response: str) -> Any:
            return result

    with make(qwen, tokenizer, Wrong()) as rollout, pytest.raises(EnvironmentContractError, match=message):
        rollout.collect(Wrong().tasks("train"))


def test_plain_methods_run_in_threads_and_give_what_async_ones_give(qwen: Path, tokenizer: Tokenizer) -> None:
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
                [t.segments[0].tokens.tolist() for t in all_trajectories(rollout.collect(environment.tasks("")))]
            )
    assert results[0] == results[1]
    assert threads and all(name.startswith("rlflow-environment") for name in threads)


def test_it_works_inside_a_running_event_loop_and_from_several_in_turn(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:

        async def cell() -> list[list[int]]:
            return [t.segments[0].tokens.tolist() for t in all_trajectories(rollout.collect(environment.tasks("")))]

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
        assert len(trajectory.segments[0]) == trajectory.turns[-1].stop  # but its answer was not appended


def test_a_response_that_fills_its_budget_truncates_the_episode(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    environment.stop = ()
    with make(qwen, tokenizer, environment, max_response_tokens=3) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")))
    for trajectory in trajectories:
        ended = int(trajectory.segments[0].tokens[-1]) in tokenizer.eos_ids
        assert ended or (trajectory.stop is StopReason.MAX_TOKENS and trajectory.metrics["response_tokens"] == 3)


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
            assert trajectory.metrics["observation_tokens"] == observation * (len(trajectory.turns) - 1)
            assert bool(trajectory.segments[0].loss_mask[-1])


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
        between = tokenizer.decode(tokens[first.stop : second.start].tolist(), skip_special_tokens=False)
        start = "" if int(tokens[first.stop - 1]) in tokenizer.eos_ids else "<|im_end|>"
        assert between == f"{start}\n<|im_start|>user\nDoc 1<|im_end|>\n<|im_start|>assistant\n"


def test_messages_need_a_conversation(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking(observation=[{"role": "user", "content": "Doc 1"}])
    with make(qwen, tokenizer, environment) as rollout, pytest.raises(EnvironmentContractError, match="plain text"):
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
            t for turn in trajectory.turns for t in trajectory.segments[turn.segment].tokens[turn.start : turn.stop]
        ]
        assert len(trained) == int(before.loss_mask.sum() + after.loss_mask.sum())
        assert [turn.segment for turn in trajectory.turns] == [0, 0, 1]
        text = tokenizer.decode(after.tokens.tolist())
        assert "page 2" in text and text.count("Orvan Telmik") == 1


def test_seeds_follow_step_task_and_attempt(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    tasks = environment.tasks("train")

    def texts(rollout: Rollout, chosen: Sequence[Task], step: int) -> list[list[str]]:
        return [[turn.response for turn in t.turns] for t in all_trajectories(rollout.collect(chosen, step=step))]

    with make(qwen, tokenizer, environment) as rollout, make(qwen, tokenizer, environment, seed=1) as other:
        base = texts(rollout, tasks, 0)
        assert texts(rollout, tasks[2:], 0) == base[8:]
        assert texts(rollout, tasks, 1) != base
        assert texts(other, tasks, 0) != base
        assert len({str(text) for text in base[:4]}) > 1
        groups = rollout.collect([tasks[0], tasks[0]], step=3)
    assert [group.id for group in groups] == ["3:t0", "3:t0:1"]
    assert groups[0].trajectories[0].turns[0].response != groups[1].trajectories[0].turns[0].response or (
        groups[0].trajectories[1].turns[0].response != groups[1].trajectories[1].turns[0].response
    )


class Jittery(Asking):
    """Takes its time, a different one each time, in threads and in the loop."""

    async def reset(self, task: Task) -> Episode:
        await asyncio.sleep(random.random() * 0.005)
        return await super().reset(task)

    async def step(self, episode: Episode, response: str) -> Step:
        await asyncio.sleep(random.random() * 0.01)
        return await super().step(episode, response)


def test_deterministic_collections_are_equal_bit_for_bit_whatever_the_timing(qwen: Path, tokenizer: Tokenizer) -> None:
    def bits(environment: Environment) -> list[Any]:
        engine = EmbeddedEngine(qwen, tokenizer, max_concurrency=5, deterministic=True)
        options = {"samples_per_prompt": 4, "max_response_tokens": 40, "deterministic": True}
        with Rollout(engine, environment, tokenizer, **options) as rollout:
            collected = [rollout.collect(environment.tasks("train"), step=step) for step in (0, 1)]
        segments = [t.segments[0] for groups in collected for t in all_trajectories(groups)]
        return [(s.tokens.tolist(), s.logprobs.tolist()) for s in segments]

    expected = bits(Asking())
    assert len({len(tokens) for tokens, _ in expected}) > 3  # ragged: episodes of different lengths
    assert bits(Jittery()) == expected
    assert bits(Jittery()) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_interrupted_collection_leaves_nothing_in_flight(
    qwen: Path, tokenizer: Tokenizer, deterministic: bool
) -> None:
    class Slow(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            await asyncio.sleep(60)
            return Step()

    environment = Slow()
    environment.stop = ("e",)
    with make(qwen, tokenizer, environment, max_response_tokens=3000, deterministic=deterministic) as rollout:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rollout.collect(environment.tasks("train"))
        decoded = rollout.engines[0].statistics.decoded
        time.sleep(0.1)
        assert rollout.engines[0].statistics.decoded == decoded > 0
        assert sorted(environment.closed.values()) == [1] * len(environment.episodes)
        environment.step = Asking().step
        environment.stop = Asking.stop
        assert len(all_trajectories(rollout.collect(environment.tasks("train")[:1], max_aborted_share=0.0))) == 4


def test_several_engines_share_the_episodes_and_give_what_one_gives(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    engines = [RecordingEngine(qwen, tokenizer) for _ in range(3)]
    options = {"samples_per_prompt": 4, "max_response_tokens": 40}
    with Rollout(engines, environment, tokenizer, **options) as rollout:
        spread = [t.segments[0].tokens.tolist() for t in all_trajectories(rollout.collect(environment.tasks("")))]
    with make(qwen, tokenizer, environment) as rollout:
        one = [t.segments[0].tokens.tolist() for t in all_trajectories(rollout.collect(environment.tasks("")))]
    assert spread == one
    attempts = [{request_id for request_id, *_ in engine.calls} for engine in engines]
    assert [len(ids) for ids in attempts] == [8, 4, 4]
    assert not (attempts[0] & attempts[1] or attempts[1] & attempts[2] or attempts[0] & attempts[2])


def test_more_episodes_than_slots_never_prefill_a_history_twice(qwen: Path, tokenizer: Tokenizer) -> None:
    class SlowForTheFirst(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if episode is self.episodes[0]:  # others come and go in the meantime, and must not take its slot
                await asyncio.sleep(0.1)
            return await super().step(episode, response)

    environment = SlowForTheFirst()
    engine = RecordingEngine(qwen, tokenizer, max_concurrency=3)
    tasks = [Task(f"t{index}", f"{index} Question") for index in range(15)]
    with Rollout(engine, environment, tokenizer, samples_per_prompt=1, max_response_tokens=40) as rollout:
        trajectories = all_trajectories(rollout.collect(tasks))
    assert trajectories[0].metrics["turns"] > 1
    appended = sum(int((~t.segments[0].loss_mask).sum()) for t in trajectories)
    last_tokens = sum(len(t.turns) - 1 for t in trajectories)  # a sampled turn's last token has no keys and values yet
    assert engine.statistics.prefilled == appended + last_tokens


def test_weight_sync_is_verified(qwen: Path, other_qwen: Path, tokenizer: Tokenizer) -> None:
    class Stale(EmbeddedEngine):
        async def load_weights(self, weights: Any, version: int) -> None:
            """Says that it loaded them."""

    environment = Asking()
    weights = list(iterate_weights(other_qwen))
    with make(qwen, tokenizer, environment) as rollout:
        rollout.load_weights(iter(weights), version=4)
        versions = {
            int(v) for t in all_trajectories(rollout.collect(environment.tasks(""))) for v in t.segments[0].versions
        }
        assert versions == {-1, 4}
    with Rollout(Stale(qwen, tokenizer), environment, tokenizer) as rollout:
        with pytest.raises(RolloutError, match="weight sync: after version 4"):
            rollout.load_weights(weights, version=4)


def test_stream_collects_one_batch_after_another(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    tasks = environment.tasks("train")
    with make(qwen, tokenizer, environment) as rollout:
        ids = [[group.id for group in groups] for groups in rollout.stream([tasks[:2], tasks[2:3]], start=5)]
    assert ids == [["5:t0", "5:t1"], ["6:t2"]]


def test_state_survives_a_round_trip(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout, make(qwen, tokenizer, environment) as resumed:
        rollout.collect(environment.tasks("train"))
        rollout.load_weights(iterate_weights(qwen), version=9)
        resumed.load_state_dict(rollout.state_dict())
        assert resumed.state_dict() == rollout.state_dict()
        assert resumed.version == 9


def test_no_tasks_give_no_groups_and_wrong_options_are_named(qwen: Path, tokenizer: Tokenizer) -> None:
    with make(qwen, tokenizer, Asking()) as rollout:
        assert rollout.collect([]) == []
    with pytest.raises(ConfigError, match=r"rollout\.max_turns: expected at least 1, found 0"):
        make(qwen, tokenizer, Asking(), max_turns=0)
    with pytest.raises(ConfigError, match="unknown engine 'vlm'"):
        Rollout.from_pretrained(qwen, Asking(), engine={"name": "vlm"})
