"""Which episode runs when and where: seeds, determinism, interruption, several engines, weight sync."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sleeping import FakeEngine
from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.types import Episode, Step, Task, Trajectory
from tests.unit.rollout.asking import Asking, RecordingEngine, all_trajectories, make


def test_seeds_follow_step_task_and_attempt(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    tasks = environment.tasks("train")

    def texts(rollout: Rollout, chosen: Sequence[Task], step: int) -> list[list[str]]:
        return [
            [turn.response for turn in t.turns]
            for t in all_trajectories(rollout.collect(chosen, step=step))
        ]

    with (
        make(qwen, tokenizer, environment) as rollout,
        make(qwen, tokenizer, environment, seed=1) as other,
    ):
        base = texts(rollout, tasks, 0)
        assert texts(rollout, tasks, 1) != base
        assert texts(other, tasks, 0) != base
        assert len({str(text) for text in base[:4]}) > 1
    with make(qwen, tokenizer, environment) as again:
        assert texts(again, tasks[2:], 0) == base[8:]


def test_a_task_that_comes_again_in_a_step_gets_samples_and_a_group_of_its_own(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    task, looks_alike = Task("a", "Question?"), Task("a:1", "Question?")
    with make(qwen, tokenizer, Asking()) as rollout:
        groups = rollout.collect([task, task, looks_alike], step=3) + rollout.collect(
            [task], step=3
        )
        groups += rollout.collect([task], step=4)
        assert [group.id for group in groups] == ["3:a", "3.1:a", "3:a:1", "3.2:a", "4:a"]
        texts = [
            str([turn.response for t in group.trajectories for turn in t.turns]) for group in groups
        ]
        assert len(set(texts)) == 5
        evaluated = [rollout.collect([task], step=-1)[0] for _ in range(2)]
    assert [group.id for group in evaluated] == ["-1:a", "-1:a"]
    first, second = (
        [t.segments[0].tokens.tolist() for t in group.trajectories] for group in evaluated
    )
    assert first == second


def test_every_trajectory_of_a_run_has_an_id_of_its_own_and_a_resumed_run_gives_it_again(
    tokenizer: Tokenizer,
) -> None:
    tasks = [
        Task("a", "Question?"),
        Task("a", "Question?"),
        Task("a:1", "Question?"),
        Task("a/1", "Question?"),
    ]

    def collect(rollout: Rollout, step: int) -> list[Trajectory]:
        return all_trajectories(rollout.collect(tasks, step))

    def new() -> Rollout:
        return Rollout(
            FakeEngine(tokenizer), Asking(), tokenizer, samples_per_prompt=3, max_response_tokens=4
        )

    with new() as rollout:
        before = collect(rollout, -1) + collect(rollout, 1) + collect(rollout, 1)
        state = rollout.state_dict()
        after = collect(rollout, 2) + collect(rollout, -1)
    with new() as rollout:
        rollout.load_state_dict(state)
        resumed = collect(rollout, 2) + collect(rollout, -1)
    ids = [trajectory.id for trajectory in before + after]
    assert len(set(ids)) == len(ids) == 60 and all(ids)
    assert [trajectory.id for trajectory in resumed] == [trajectory.id for trajectory in after]
    assert [trajectory.attempt for trajectory in after] == [0, 1, 2] * 8
    assert make_batch(after).attempt.tolist() == [0, 1, 2] * 8


@pytest.mark.parametrize("plain", [True, False])
def test_a_turn_lasts_until_the_environment_has_answered(tokenizer: Tokenizer, plain: bool) -> None:
    class Slow(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            await asyncio.sleep(0.02)
            return await super().step(episode, response)

    class SlowPlain(Asking):
        def step(self, episode: Episode, response: str) -> Step:  # type: ignore[override]
            time.sleep(0.02)
            return asyncio.run(super().step(episode, response))

    environment = SlowPlain() if plain else Slow()
    with Rollout(FakeEngine(tokenizer), environment, tokenizer, max_response_tokens=4) as rollout:
        trajectories = all_trajectories(rollout.collect(environment.tasks("train")[:1]))
    assert min(turn.duration_s for trajectory in trajectories for turn in trajectory.turns) >= 0.02


class Jittery(Asking):
    """Takes its time, a different one each time, in threads and in the loop."""

    async def reset(self, task: Task) -> Episode:
        await asyncio.sleep(random.random() * 0.005)
        return await super().reset(task)

    async def step(self, episode: Episode, response: str) -> Step:
        await asyncio.sleep(random.random() * 0.01)
        return await super().step(episode, response)


def test_deterministic_collections_are_equal_bit_for_bit_whatever_the_timing(
    qwen: Path, tokenizer: Tokenizer
) -> None:
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
    with make(
        qwen, tokenizer, environment, max_response_tokens=3000, deterministic=deterministic
    ) as rollout:
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
        assert (
            len(
                all_trajectories(
                    rollout.collect(environment.tasks("train")[:1], max_aborted_share=0.0)
                )
            )
            == 4
        )


def test_several_engines_share_the_episodes_and_give_what_one_gives(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    environment = Asking()
    engines = [RecordingEngine(qwen, tokenizer) for _ in range(3)]
    options = {"samples_per_prompt": 4, "max_response_tokens": 40}
    with Rollout(engines, environment, tokenizer, **options) as rollout:
        spread = [
            t.segments[0].tokens.tolist()
            for t in all_trajectories(rollout.collect(environment.tasks("")))
        ]
    with make(qwen, tokenizer, environment) as rollout:
        single = [
            t.segments[0].tokens.tolist()
            for t in all_trajectories(rollout.collect(environment.tasks("")))
        ]
    assert spread == single
    attempts = [{request_id for request_id, *_ in engine.calls} for engine in engines]
    assert [len(ids) for ids in attempts] == [8, 4, 4]
    assert not (attempts[0] & attempts[1] or attempts[1] & attempts[2] or attempts[0] & attempts[2])


def test_more_episodes_than_slots_never_prefill_a_history_twice(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    class SlowForTheFirst(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if (
                episode is self.episodes[0]
            ):  # others come and go in the meantime, and must not take its slot
                await asyncio.sleep(0.1)
            return await super().step(episode, response)

    environment = SlowForTheFirst()
    engine = RecordingEngine(qwen, tokenizer, max_concurrency=3)
    tasks = [
        Task(f"t{index}", f"{letter} Question") for index, letter in enumerate("abcdefghijklmno")
    ]  # nothing to share
    with Rollout(
        engine, environment, tokenizer, samples_per_prompt=1, max_response_tokens=40
    ) as rollout:
        trajectories = all_trajectories(rollout.collect(tasks))
    assert trajectories[0].metrics["turns"] > 1
    appended = sum(int((~t.segments[0].loss_mask).sum()) for t in trajectories)
    last_tokens = sum(
        len(t.turns) - 1 for t in trajectories
    )  # a sampled turn's last token has no keys and values yet
    assert engine.statistics.prefilled == appended + last_tokens


def test_state_survives_a_round_trip(qwen: Path, tokenizer: Tokenizer) -> None:
    environment = Asking()
    with (
        make(qwen, tokenizer, environment) as rollout,
        make(qwen, tokenizer, environment) as resumed,
    ):
        rollout.collect(environment.tasks("train"))
        rollout.load_weights(iterate_weights(qwen), version=9)
        resumed.load_state_dict(rollout.state_dict())
        assert resumed.state_dict() == rollout.state_dict()
        assert resumed.version == 9


def test_no_tasks_give_no_groups_and_wrong_options_are_named(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    with make(qwen, tokenizer, Asking()) as rollout:
        assert rollout.collect([]) == []
    with pytest.raises(ConfigError, match=r"rollout\.max_turns: expected at least 1, found 0"):
        make(qwen, tokenizer, Asking(), max_turns=0)
    with pytest.raises(ConfigError, match=r"rollout\.temperature: expected at least 0, found -1"):
        make(qwen, tokenizer, Asking(), temperature=-1)
    with pytest.raises(
        ConfigError, match=r"expected an Environment, found <class .*; of a class make one"
    ):
        make(qwen, tokenizer, Asking)
    with pytest.raises(ConfigError, match="engine: unknown name 'vlm'"):
        Rollout.from_pretrained(qwen, Asking(), engine={"name": "vlm"})
