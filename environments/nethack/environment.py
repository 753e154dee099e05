"""NetHack by nle (the NetHack Learning Environment), as text.

Source: Küttler et al. 2020 (arXiv 2006.13760), nle 1.3.0."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.nethack.actions import NAMES, check_names, parse_action
from rlflow_environments.nethack.dungeons import Dungeons, Game, NetHackError
from rlflow_environments.nethack.screen import text_of

PROMPT = "NetHack: {goal}. Actions, a line each: {actions}.\n"
GOALS = {"depth": "reach deeper levels", "score": "raise the score"}
NO_ACTION = "No action: expected a name, then answers if the game asks.\n"
NOTHING_ASKED = "The game asks nothing: expected the name of an action.\n"
NEXT = "Action:\n"
CHARACTER = re.compile(
    "@|(arc|bar|cav|hea|kni|mon|pri|ran|rog|sam|tou|val|wiz)-(hum|elf|dwa|gno|orc)"
    "-(law|neu|cha)-(mal|fem)"
)


class NetHack(Environment):
    """A policy reads the game's message, the map around it and the line of its status, and writes
    the names of actions, a line per turn. The reward is what the turn added to the deepest level
    reached, or to the game's score.

    The same task is the same dungeon for every attempt. A game that crashes or hangs aborts its
    episode, which is counted and never scored."""

    stop = ("\n",)
    harmless_options = ("character", "reward", "turns", "tasks_per_split", "window", "seed")
    metrics = {
        "depth": Metric("levels", "deepest level that was reached", score=True),
        "score": Metric("points", "of the game, as nle's status has them", score=True),
        "died": Metric("share", "of games that ended"),
        "invalid_actions": Metric("per episode", "responses that pressed no key"),
        "nethack/lost_games": Metric("count", "games that crashed or hung", "sum"),
    }

    def __init__(
        self,
        character: str = "mon-hum-neu-mal",
        reward: Literal["depth", "score"] = "depth",
        tasks_per_split: PositiveInt = 512,
        *,
        turns: PositiveInt | None = None,
        window: PositiveInt | None = 4,
        actions: Sequence[str] | None = None,
        timeout_s: PositiveFloat = 10.0,
        seed: int = 0,
    ) -> None:
        """character: role, race, alignment and gender as NetHack writes them, or @, which the
        dungeon's seed draws. turns: most responses of an episode; none: rollout.max_turns. window:
        columns and rows on each side of the player that are shown; none: the whole map. actions:
        names of those that there are; none: all. timeout_s: of one action. Raises ConfigError,
        MissingPackageError."""
        if not CHARACTER.fullmatch(character):
            raise ConfigError(
                "environment.character: expected role-race-alignment-gender such as "
                f"val-dwa-law-fem, or @, found '{character}'."
            )
        self._names = check_names(NAMES if actions is None else actions)
        self._dungeons = Dungeons(timeout_s)
        self._character, self._reward, self._window = character, reward, window
        self.max_turns = turns
        prompt = PROMPT.format(goal=GOALS[reward], actions=", ".join(self._names))
        self._tasks = {
            split: [_task(split, number, seed, prompt) for number in range(tasks_per_split)]
            for split in ("train", "val")
        }
        self._lost = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    async def reset(self, task: Task) -> Episode:
        """A game of the task's dungeon; what it shows ends the prompt."""
        try:
            game, view = await self._dungeons.begin(self._character, task.answer)
        except NetHackError:
            self._lost += 1
            raise
        state = {"game": game, "view": view, "known": {}, "deepest": view["depth"], "invalid": 0}
        prompt = f"{task.prompt}{self._shown(state)}"
        return Episode(dataclasses.replace(task, prompt=prompt), scratch=state)

    async def step(self, episode: Episode, response: str) -> Step:
        pressed, state = parse_action(response, self._names), episode.scratch
        if pressed is None:
            return _refused(state, NO_ACTION)
        game: Game = state["game"]
        before = state["view"]
        try:
            view = await game.ask(pressed)
        except NetHackError:
            self._lost += 1
            raise
        if view["refused"]:
            return _refused(state, NOTHING_ASKED)
        if view["place"] != before["place"]:
            state["known"] = {}
        deeper = max(0, view["depth"] - state["deepest"])
        scored = view["score"] - before["score"]
        state |= {"view": view, "deepest": state["deepest"] + deeper}
        reward = float(deeper if self._reward == "depth" else scored)
        return Step(self._shown(state), reward, view["done"], _numbers(state))

    async def close(self, episode: Episode) -> None:
        episode.scratch["game"].close()

    def report(self) -> dict[str, float]:
        lost, self._lost = self._lost, 0
        return {"nethack/lost_games": float(lost)}

    def shutdown(self) -> None:
        self._dungeons.close()

    def _shown(self, state: Mapping[str, Any]) -> str:
        return text_of(state["view"], self._window, state["known"]) + NEXT


def _task(split: str, number: int, seed: int, prompt: str) -> Task:
    """A dungeon's seed is its answer: of the run's seed, the split and the number."""
    name = f"{split}-{number}"
    return Task(name, prompt, zlib.crc32(f"{seed}/{name}".encode()))


def _refused(state: dict[str, Any], said: str) -> Step:
    state["invalid"] += 1
    return Step(said + NEXT, metrics=_numbers(state))


def _numbers(state: Mapping[str, Any]) -> dict[str, float]:
    view = state["view"]
    numbers = {"depth": state["deepest"], "score": view["score"], "died": view["done"]}
    numbers["invalid_actions"] = state["invalid"]
    return {name: float(value) for name, value in numbers.items()}
