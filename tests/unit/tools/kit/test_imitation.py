"""A tiny policy by imitation: what is demonstrated, what is trained of it, and what a user may get wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rlflow_tools.kit.imitation import (
    Lessons,
    demonstrate,
    make_policy,
    row_weights,
    to_trajectory,
)

from rlflow import Rollout, make_batch
from rlflow.commands.cli import main
from rlflow.environment import Environment
from rlflow.errors import ConfigError, StorageError
from rlflow.types import Episode, Step, Task
from tests.reference import ORACLE


class Echo(Environment):
    """Asks for the letter that it shows; twice."""

    stop = ("\n",)

    def __init__(self) -> None:
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(letter, f"say {letter}: ", letter) for letter in "abcd"]

    def step(self, episode: Episode, response: str) -> Step:
        right = float(response == f"{episode.task.answer}\n")
        return Step("again: ", reward=right / 2, terminated=episode.turns == 2)

    async def close(self, episode: Episode) -> None:
        self.closed += 1


def player(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    return "hm\n" if clumsy and generator.random() < 0.5 else f"{prompt[4]}\n"


def test_an_episode_is_played_to_its_end_and_told_apart_by_who_wrote_it() -> None:
    environment = Echo()
    first, second = demonstrate(environment, player, environment.tasks("train")[:2], 3, "seed")
    assert (
        first.parts == (("say a: ", False), ("a\n", True), ("again: ", False), ("a\n", True))
        and first.reward == 1.0
    )
    assert second.parts[0] == ("say b: ", False) and environment.closed == 2
    (cut,) = demonstrate(environment, player, environment.tasks("train")[:1], 1, "seed")
    assert cut.parts == (("say a: ", False), ("a\n", True)), (
        "the turn limit; nobody reads the last observation"
    )


def test_equal_seeds_play_equal_games_and_clumsiness_is_the_players() -> None:
    tasks = Echo().tasks("train") * 25
    clumsy, again, other = (
        demonstrate(Echo(), player, tasks, 2, seed, clumsy=True) for seed in ("x", "x", "y")
    )
    assert clumsy == again != other
    assert 0.3 < sum(one.reward for one in clumsy) / 100 < 0.7
    assert {one.reward for one in demonstrate(Echo(), player, tasks, 2, "x")} == {1.0}


def test_what_the_policy_wrote_is_trained_and_nothing_else() -> None:
    parts = [("ab", False), ("cd", True), ("ab", False), ("c", True)]
    segment = to_trajectory(parts, lambda text: [ord(letter) for letter in text]).segments[0]
    assert bytes(segment.tokens.tolist()) == b"abcdabc"
    assert segment.loss_mask.tolist() == [False, False, True, True, False, False, True]
    ended = to_trajectory(
        parts, lambda text: [ord(letter) for letter in text], lambda text: [0]
    ).segments[0]
    assert ended.tokens.tolist() == [97, 98, 0, 97, 98, 0], "responses by an encoder of their own"
    repeated = to_trajectory(
        parts, lambda text: [ord(letter) for letter in text], repeats=True
    ).segments[0]
    assert repeated.loss_mask.tolist() == [False, False, True, True, False, True, True], (
        "ab was said before"
    )
    batch = make_batch(
        [to_trajectory(parts, lambda text: [ord(letter) for letter in text], repeats=True)]
    )
    assert torch.equal(row_weights(batch)[0] * 3.5, torch.tensor([0, 0, 1, 1, 0, 0.5, 1.0]))


def failing(*_: Any) -> str:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(lambda *_: 7, "expected the text of a response, found 7"), (lambda *_: "", "found ''"),
     (failing, "the player failed after 0 turns: KeyError: 'x'")],
)  # fmt: skip
def test_a_player_that_fails_is_one_line_and_closes_its_episode(wrong: Any, words: str) -> None:
    environment = Echo()
    with pytest.raises(ConfigError, match=words):
        demonstrate(environment, wrong, environment.tasks("train"), 2, "seed")
    assert environment.closed == len(environment.tasks("train")), "all that were begun"


def test_a_policy_learns_what_the_player_says_and_can_be_rolled_out(tmp_path: Path) -> None:
    """Forty lessons teach the form: two tokens of the game and the stop string, not yet which letter."""
    environment, losses = Echo(), list[float]()
    lessons = Lessons(steps=40, rows=16, lr=1e-2, turns=2, clumsy=1.0, backend=ORACLE)
    reward = make_policy(
        environment,
        player,
        tmp_path / "policy",
        lessons,
        say=lambda step, loss: losses.append(loss),
    )
    assert 0.3 < reward < 0.7 and len(losses) == 40
    assert losses[-1] < 1.0 < 4.0 < losses[0]
    for place in (tmp_path / "policy", tmp_path / "policy/config.json/below"):
        with pytest.raises(StorageError, match=r"exists; choose|cannot be written"):
            make_policy(environment, failing, place, lessons)
    with Rollout.from_pretrained(
        tmp_path / "policy", environment, max_turns=2, max_response_tokens=4, max_total_tokens=64
    ) as rollout:
        groups = rollout.collect(environment.tasks("train"))
    said = [turn.response for group in groups for one in group.trajectories for turn in one.turns]
    assert sum(response in ("a\n", "b\n", "c\n", "d\n") for response in said) > 0.8 * len(said), (
        said
    )


def test_a_scaffold_with_a_policy_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> float:
        raise ConfigError("no")

    monkeypatch.setattr("rlflow_tools.kit.imitation.make_policy", fails)
    assert (
        main(["env", "new", "game_that_is_never_made", "--policy", "--directory", str(tmp_path)])
        == 2
    )
    assert list(tmp_path.iterdir()) == [] and "ConfigError: no" in capsys.readouterr().err
