"""Games of NetHack in nle, compared with nle itself."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow import check_environment
from rlflow.rollout import Rollout
from rlflow.types import Episode, Step, StopReason, Task
from rlflow_environments.nethack import dungeons
from rlflow_environments.nethack.actions import NAMES
from rlflow_environments.nethack.dungeons import NetHackError
from rlflow_environments.nethack.environment import NetHack
from rlflow_environments.nethack.player import play
from tests.flow.letters import write_letters_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nle") is None, reason="no package nle: the extra 'nethack'"
)
DIGGER = "arc-hum-neu-mal"


@pytest.fixture(scope="module")
def made() -> Iterator[NetHack]:
    environment = NetHack(DIGGER, window=None, tasks_per_split=64)
    yield environment
    environment.shutdown()


async def played(made: NetHack, task: Task, *responses: str) -> tuple[Episode, list[Step]]:
    episode = await made.reset(task)
    try:
        steps = []
        for response in responses:
            steps.append(await made.step(episode, response))
            if steps[-1].terminated:
                break
        return episode, steps
    finally:
        await made.close(episode)


def run(made: NetHack, *responses: str, task: int = 0) -> tuple[Episode, list[Step]]:
    return asyncio.run(played(made, made.tasks("train")[task], *responses))


class Oracle:
    """nle's own observations of the same game, its keys pressed one by one."""

    def __init__(self, seed: int) -> None:
        from nle.nethack import nethack

        self.names = list(nethack.OBSERVATION_DESC)
        self.game = nethack.Nethack(
            playername=f"Agent-{DIGGER}", ttyrec=None, fix_moon_phase=True, copy=True
        )
        self.game.set_initial_seeds(seed, seed, False)
        self.messages: list[str] = []
        self.take(self.game.reset())

    def take(self, observation: Any) -> None:
        self.seen = dict(zip(self.names, observation, strict=True))
        message = bytes(self.seen["message"]).split(b"\0")[0].decode("latin-1").strip()
        self.messages += [message] if message else []
        if b"--More--" in self.seen["tty_chars"].tobytes():
            self.take(self.game.step(ord(" "))[0])

    def press(self, key: str) -> None:
        self.messages = []
        self.take(self.game.step(ord(key))[0])

    def map(self) -> str:
        rows = [bytes(row).decode("latin-1").rstrip() for row in self.seen["chars"]]
        return "\n".join(rows).strip("\n")

    def status(self) -> str:
        return bytes(self.seen["tty_chars"][-1]).decode("latin-1").strip()


def test_the_text_shows_what_nles_own_observation_says(made: NetHack) -> None:
    task, draw = made.tasks("train")[3], random.Random(0)
    names = [name for name in NAMES if len(NAMES[name]) == 1 and name.strip("far-") in NAMES][:16]
    responses = [draw.choice([*names, "search", "look", "wait"]) for _ in range(60)]
    episode, steps = run(made, *responses, task=3)
    oracle = Oracle(task.answer)
    assert str(episode.task.prompt).endswith(f"{oracle.map()}\n{oracle.status()}\nAction:\n")
    assert " ".join(oracle.messages) in str(episode.task.prompt)
    told = 0
    for response, step in zip(responses, steps, strict=True):
        oracle.press(NAMES[response])
        lines = str(step.observation).split("\n")
        assert f"{oracle.map()}\n{oracle.status()}\nAction:\n" in str(step.observation)
        told += bool(oracle.messages)
        assert all(
            message in lines[0] or message in str(step.observation) for message in oracle.messages
        )
        assert oracle.messages or lines[0] == "(no message)"
    numbers = oracle.seen["blstats"]
    assert (steps[-1].metrics["score"], steps[-1].metrics["depth"]) == (numbers[9], numbers[12])
    assert told > 3


def test_names_press_the_keys_that_nle_has_for_them() -> None:
    from nle.nethack import actions

    short = {"north": "N", "east": "E", "south": "S", "west": "W"}
    short |= {f"{a}{b}": short[a] + short[b] for a in ("north", "south") for b in ("east", "west")}
    for name, key in NAMES.items():
        if name in short:
            wanted = actions.CompassDirection[short[name]]
        elif name.startswith("far-"):
            wanted = actions.CompassDirectionLonger[short[name[4:]]]
        elif name in ("up", "down", "wait"):
            wanted = actions.MiscDirection[name.upper()]
        elif name.startswith("travel"):
            assert ord(key[0]) == actions.Command.TRAVEL
            continue
        else:
            wanted = actions.Command[name.upper()]
        assert ord(key) == wanted, name


def test_a_task_is_one_dungeon_for_every_attempt(made: NetHack) -> None:
    responses = ["north", "apply", "e", ">", "far-east", "search"]
    (one, first), (other, second) = run(made, *responses), run(made, *responses)
    assert one.task.prompt == other.task.prompt
    assert [step.observation for step in first] == [step.observation for step in second]
    assert run(made, task=1)[0].task.prompt != one.task.prompt
    seeds = {task.answer for split in ("train", "val") for task in made.tasks(split)}
    assert len(seeds) == 128 and made.tasks("test") == []


def test_a_deeper_level_is_rewarded_once_and_questions_are_asked(made: NetHack) -> None:
    _, steps = run(made, "y", "north", *["apply", "e", ">"] * 6, "search", task=4)
    assert (
        steps[0].observation.startswith("The game asks nothing")
        and steps[0].metrics["invalid_actions"] == 1
    )
    assert "What do you want to use or apply? [" in steps[2].observation
    assert "In what direction do you want to dig? [" in steps[3].observation
    depths = [1.0, *[step.metrics["depth"] for step in steps]]
    assert [step.reward for step in steps] == [
        after - before for before, after in itertools.pairwise(depths)
    ]
    assert depths[-1] > 1 and f"Dlvl:{depths[-1]:.0f}" in steps[-1].observation
    _, [menu, chosen] = run(made, "apply *", "e")
    assert "e - a +0 pick-axe" in menu.observation and "(end)" in menu.observation
    assert "In what direction" in chosen.observation and not chosen.metrics["invalid_actions"]


def test_a_game_that_ends_keeps_its_numbers(made: NetHack) -> None:
    """Whoever prays again and again is struck."""
    _, steps = run(made, *["pray yes"] * 40)
    assert steps[-1].terminated and steps[-1].metrics["died"] == 1.0
    assert steps[-1].metrics["depth"] == 1.0 and "Dlvl:1" in steps[-1].observation
    assert not any(step.terminated for step in steps[:-1])


def processes() -> list[psutil.Process]:
    """Of games."""
    server = [one for one in psutil.Process().children() if "nethack" in " ".join(one.cmdline())]
    return [game for one in server for watch in one.children() for game in watch.children()]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGALRM])
def test_a_crash_costs_its_episode_alone(made: NetHack, number: signal.Signals) -> None:
    async def both() -> str:
        first = await made.reset(made.tasks("train")[0])
        [game] = processes()
        beside = await made.reset(made.tasks("train")[0])
        os.kill(game.pid, number)
        with pytest.raises(NetHackError) as told:
            await made.step(first, "search")
        assert not (await made.step(beside, "search")).terminated
        await made.close(first)
        await made.close(beside)
        return str(told.value)

    made.report()
    told = asyncio.run(both())
    assert ("hung" if number == signal.SIGALRM else number.name) in told
    assert made.report() == {"nethack/lost_games": 1.0} and made.report() == {
        "nethack/lost_games": 0.0
    }
    assert not run(made, "search")[1][0].terminated


@pytest.mark.slow
def test_games_and_their_files_end_with_the_episode_and_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dungeons, "GRACE_S", 1.0)
    long = tmp_path / ("long" * 30)  # a socket's address has 108 characters at most
    long.mkdir()
    monkeypatch.setattr(dungeons.tempfile, "tempdir", str(long))
    environment = NetHack(tasks_per_split=2, timeout_s=0.5)

    async def hangs() -> None:
        ended, hung = [await environment.reset(task) for task in environment.tasks("train")]
        one, other = processes()
        folder = environment._dungeons._folder
        assert len(list(folder.glob("game-*"))) == 2
        await environment.close(ended)
        while one.is_running() and other.is_running():
            await asyncio.sleep(0.02)
        left = other if other.is_running() else one
        os.kill(left.pid, signal.SIGSTOP)  # its timer does not help
        with pytest.raises(NetHackError, match=r"no answer in 0\.5 s"):
            await environment.step(hung, "search")
        await environment.close(hung)
        while list(folder.glob("game-*")):
            await asyncio.sleep(0.02)
        assert not left.is_running()

    asyncio.run(hangs())
    server = psutil.Process(environment._dungeons._process.pid)  # type: ignore[union-attr]
    environment.shutdown()
    assert not server.is_running() and not environment._dungeons._folder.exists()


@pytest.mark.slow
def test_sixty_four_episodes_at_once(made: NetHack) -> None:
    async def all_of() -> list[float]:
        async def one(task: Task) -> float:
            episode, said, draw, total = await made.reset(task), [], random.Random(task.id), 0.0
            for _ in range(14):
                response = play(str(episode.task.prompt), said, draw, False)
                step = await made.step(episode, response)
                said.append((response, str(step.observation)))
                total += step.reward
            await made.close(episode)
            return total

        return await asyncio.gather(*map(one, made.tasks("train")))

    returns = asyncio.run(all_of())
    assert len(returns) == 64 and sum(returns) > 64 and made.report()["nethack/lost_games"] == 0


@pytest.mark.slow
def test_a_crash_in_a_rollout_is_aborted_and_counted_and_never_scored(
    made: NetHack, tmp_path: Path
) -> None:
    model = write_letters_model(tmp_path)

    def crash() -> None:
        while not (found := processes()):
            time.sleep(0.002)
        os.kill(found[0].pid, signal.SIGSEGV)

    limits = {"max_turns": 20, "max_response_tokens": 2, "max_total_tokens": 480}
    with ThreadPoolExecutor(1) as thread, Rollout.from_pretrained(model, made, **limits) as rollout:
        crashed = thread.submit(crash)
        (group,) = rollout.collect(
            made.tasks("train")[:1], samples_per_prompt=4, max_aborted_share=1.0
        )
        crashed.result()
    [lost] = [one for one in group.trajectories if one.stop is StopReason.ABORTED]
    assert "SIGSEGV" in lost.error and len(group.usable) == 3 and lost not in group.usable


@pytest.mark.slow
def test_the_contract_holds() -> None:
    environment = NetHack(DIGGER, "score", tasks_per_split=16)
    try:
        report = check_environment(environment, episodes=8, player=play)
    finally:
        environment.shutdown()
    assert report.passed, str(report)
