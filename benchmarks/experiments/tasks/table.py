"""A cup that is to be carried to its place, by an arm that moves a step at a time; and a critic that learns from demonstrations
how far that is."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric
from rlflow_environments.wrappers.progress_values import pair_label

REFERENCE = f"{__name__}:Carrying"
PLACES = 5
STATE = re.compile(r"a(\d)c(\d)g(\d)h(\d)")
ACTIONS = "lrtp"  # left, right, take, put


class Carrying(SmallTask):
    """Arm, cup and goal on a line of five places; 1 once the cup stands at the goal, else 0. Observations say where all are."""

    characters = "acgh01234" + ACTIONS
    metrics = {
        "success": Metric(
            "share", "of episodes with the cup in its place", score=True, shown="{:.2f}"
        )
    }

    def __init__(self, turns: int = 10) -> None:
        super().__init__()
        self.max_turns = turns
        states = [
            (arm, cup, goal, 0)
            for arm in range(PLACES)
            for cup in range(PLACES)
            for goal in range(PLACES)
            if cup != goal
        ]
        self._tasks = [Task(shown(state), shown(state), state) for state in states]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def answer(self, episode: Episode, response: str) -> Step:
        state = episode.scratch["state"] = moved(
            episode.scratch.get("state", episode.task.answer), response
        )
        _, cup, goal, held = state
        done = cup == goal and not held
        return Step(
            shown(state), reward=float(done), terminated=done, metrics={"success": float(done)}
        )

    def do_half_right(self, seen: str, draw: random.Random) -> str:
        """The next action of the shortest way in half of the cases, any action in the others."""
        arm, cup, goal, held = (int(digit) for digit in STATE.findall(seen)[-1])
        way = right_way((arm, cup, goal, held))
        return actions(way[:2])[0] if len(way) > 1 and draw.random() < 0.5 else draw.choice(ACTIONS)


State = tuple[int, int, int, int]
"""(arm, cup, goal, whether the arm holds the cup)."""


def shown(state: State) -> str:
    return "a{}c{}g{}h{}".format(*state)


def moved(state: State, action: str) -> State:
    """What an action makes of a state; nothing where it cannot be done."""
    arm, cup, goal, held = state
    if action in ("l", "r"):
        arm = min(PLACES - 1, max(0, arm + (1 if action == "r" else -1)))
        return arm, arm if held else cup, goal, held
    if action == "t":
        return arm, cup, goal, int(held or arm == cup)
    return arm, cup, goal, 0 if action == "p" else held


def right_way(state: State) -> list[State]:
    """The states of the shortest way, the first one included."""
    way = [state]
    while True:
        arm, cup, goal, held = way[-1]
        if cup == goal and not held:
            return way
        aim = goal if held else cup
        action = ("p" if held else "t") if arm == aim else "r" if aim > arm else "l"
        way.append(moved(way[-1], action))


class ProgressCritic:
    """A network that learns from demonstrations: of two frames, the share of the remaining work that lies between them, and
    whether the second is the last one (VLAC's pair labels, arXiv 2509.15937)."""

    def __init__(
        self, seed: int, demonstrations: Sequence[Sequence[State]], updates: int = 600
    ) -> None:
        rows = []
        for way in demonstrations:
            last = len(way) - 1
            for start in range(last):
                for end in range(last + 1):
                    label = pair_label(start, end, last)
                    assert label is not None
                    rows.append((way[start], way[end], max(-1.0, label), float(end == last)))
        pairs = features([(before, after) for before, after, _, _ in rows])
        labels = torch.tensor([[delta, done] for _, _, delta, done in rows])
        torch.manual_seed(seed)
        self._network = torch.nn.Sequential(
            torch.nn.Linear(pairs.shape[1], 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 2),
        )
        optimizer = torch.optim.Adam(self._network.parameters(), lr=3e-3)
        for _ in range(updates):
            found = self._network(pairs)
            loss = (torch.tanh(found[:, 0]) - labels[:, 0]).square().mean()
            loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(
                found[:, 1], labels[:, 1]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def reply(self, prompt: str) -> str:
        """As a language model behind an endpoint would: the last two states of the prompt are the frames."""
        before, after = (
            (int(a), int(c), int(g), int(h)) for a, c, g, h in STATE.findall(prompt)[-2:]
        )
        delta, done = self._network(features([(before, after)]))[0].tolist()
        percent = 100 * float(torch.tanh(torch.tensor(delta)))
        return f'So it seems. {{"progress": {percent:.2f}, "done": {int(done > 0)}}}'


def features(pairs: Sequence[tuple[State, State]]) -> Tensor:
    """(N, 34): places and grip of both frames, one of each kind set."""
    numbers = torch.tensor([[*before, *after] for before, after in pairs])
    sizes = [PLACES, PLACES, PLACES, 2] * 2
    columns = [
        torch.nn.functional.one_hot(numbers[:, place], size) for place, size in enumerate(sizes)
    ]
    return torch.cat(columns, dim=1).float()


def actions(way: Sequence[State]) -> list[str]:
    """What led from each state of a way to the next."""
    return [
        next(one for one in ACTIONS if moved(before, one) == after)
        for before, after in pairwise(way)
    ]
