"""An asynchronous run without a model: the real groups, pacing and state over attempts and a trainer on a virtual clock.

Attempts take random times, fail at times, and sample their tokens at moments of their own; the trainer sleeps and publishes. The
process may die anywhere; a new one goes on from the last checkpoint. A token's id is the policy that sampled it, a node in the
tree of all policies there ever were, so that a version that is called the same after a restart is not taken for the same.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.errors import RolloutError
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.groups import Groups, Terms
from rlflow.rollout.pacing import Pacing
from rlflow.rollout.players import Begun, Ended, Event, Lost
from rlflow.storage.states import load_states, put_back, states, take_out
from rlflow.types import Group, Segment, StopReason, Task, Trajectory

HANGS = 8
"""Times the longest time of an attempt, after which one that hangs is given up."""


class Killed(Exception):
    """The process is gone."""


@dataclass
class Policies:
    """Every policy there ever was: the parent of each. The distance of two is the number of updates between them."""

    parents: list[int] = field(default_factory=lambda: [-1])

    def updated(self, node: int) -> int:
        self.parents.append(node)
        return len(self.parents) - 1

    def distance(self, one: int, other: int) -> int:
        ways = []
        for node in (one, other):
            way = [node]
            while way[-1] > 0:
                way.append(self.parents[way[-1]])
            ways.append(way)
        common = len(set(ways[0]) & set(ways[1]))
        return len(ways[0]) + len(ways[1]) - 2 * common


@dataclass(frozen=True)
class Workload:
    """median_s, sigma: of an attempt's lognormal time. train_s: of a step. failing: share of the attempts. frozen: attempts stand
    still while the trainer works. lost: share of the attempts that end with the worker that plays them, or on the way to it.
    stuck: share of the attempts that hang until their deadline. group_s: see `Terms`. lives: news after which a process dies, one
    number per life but the last. moves: a resumed run has another number of places."""

    seed: int = 0
    prompts: int = 3
    samples: int = 2
    tasks: int = 24
    median_s: float = 2.0
    sigma: float = 1.2
    longest_s: float = 60.0
    train_s: float = 1.0
    places: int = 8
    failing: float = 0.05
    refused: float = 0.0
    frozen: bool = True
    lost: float = 0.0
    stuck: float = 0.0
    group_s: float | None = None
    moves: bool = False
    checkpoint_every: int = 2
    lives: tuple[int, ...] = ()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedPlayer:
    """Plays attempts on the virtual clock, `places` at a time; `events` moves the clock to the next event."""

    poll_s = 1.0

    def __init__(
        self,
        workload: Workload,
        clock: Clock,
        draw: random.Random,
        node: int,
        version: int,
        life: int | None,
    ) -> None:
        self.node, self.version = node, version
        self._workload, self._clock, self._draw = workload, clock, draw
        self._queue: list[str] = []
        self._attempts: dict[str, Attempt] = {}
        self._events: list[tuple[float, int, str, str]] = []  # time, order, kind, request
        self._sampled: dict[str, list[tuple[int, int]]] = {}  # (node, version) of each token so far
        self._failing: dict[str, bool] = {}
        self._told: list[Event] = []
        self._since: dict[str, float] = {}  # when an attempt got its place
        self.late: set[tuple[str, int]] = (
            set()
        )  # (group, number) of what was given up after `group_s`
        self._order = 0
        self._life = life
        self._places = draw.randint(1, 12) if workload.moves and version else workload.places

    def start(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            assert attempt.request_id not in self._attempts, "an id that is in flight"
            self._attempts[attempt.request_id] = attempt
            self._queue.append(attempt.request_id)
        self._fill()

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        if self._life is not None:
            self._life -= 1
            if self._life < 0:
                raise Killed
        if not self._told and timeout_s > 0:
            until = self._clock.now + timeout_s
            while not self._told and self._events and self._events[0][0] <= until:
                self._next()
            self._clock.now = self._clock.now if self._told else until
        told, self._told = self._told, []
        return told

    def cancel(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        for name in gone & set(self._sampled):
            if self._clock.now - self._since[name] > (self._workload.group_s or 1e9):
                self.late.add((self._attempts[name].group_id, self._attempts[name].number))
        self._attempts = {name: one for name, one in self._attempts.items() if name not in gone}
        self._queue = [name for name in self._queue if name not in gone]
        self._events = [event for event in self._events if event[3] not in gone]
        heapq.heapify(self._events)
        self._told = [item for item in self._told if item.request_id not in gone]
        self._sampled = {name: tokens for name, tokens in self._sampled.items() if name not in gone}
        self._fill()

    def close(self) -> None:
        self.cancel(list(self._attempts))

    def pass_time(self, seconds: float) -> None:
        """What happens while the trainer works."""
        if self._workload.frozen:
            self._events = [(time + seconds, *rest) for time, *rest in self._events]
        until = self._clock.now + seconds
        while self._events and self._events[0][0] <= until:
            self._next()
        self._clock.now = until

    def _fill(self) -> None:
        while self._queue and len(self._sampled) < self._places:
            name = self._queue.pop(0)
            self._sampled[name], self._since[name] = [], self._clock.now
            self._told.append(Begun(name, self.version))
            work = self._workload
            length = min(self._draw.lognormvariate(0, work.sigma) * work.median_s, work.longest_s)
            hangs = bool(work.stuck) and self._draw.random() < work.stuck
            length = HANGS * work.longest_s if hangs else length
            self._failing[name] = hangs or self._draw.random() < work.failing
            for share in sorted(self._draw.random() for _ in range(self._draw.randint(1, 4))):
                self._push(share * length, "token", name)
            self._push(length, "end", name)

    def _push(self, delay_s: float, kind: str, name: str) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._clock.now + delay_s, self._order, kind, name))

    def _next(self) -> None:
        self._clock.now, _, kind, name = heapq.heappop(self._events)
        if kind == "token":
            self._sampled[name].append((self.node, self.version))
            return
        tokens, attempt = self._sampled.pop(name), self._attempts.pop(name)
        failed = self._failing.pop(name)
        if self._draw.random() < self._workload.lost:
            others = [one for one in self._queue if self._draw.random() < self._workload.lost]
            for one in others:
                self._queue.remove(one)
                del self._attempts[one]
            self._told += [Lost(one, "w", "it died") for one in (name, *others)]
            self._fill()
            return
        self._told.append(Ended(name, _trajectory(attempt, tokens, failed)))
        self._fill()


def _trajectory(attempt: Attempt, tokens: list[tuple[int, int]], failed: bool) -> Trajectory:
    nodes = torch.tensor([-1, *(node for node, _ in tokens)])  # the first one is the prompt
    versions = torch.tensor([-1, *(version for _, version in tokens)])
    mask = versions >= 0
    segment = Segment(nodes.clamp(min=0), mask, torch.where(mask, -0.5, 0.0), versions)
    stop = StopReason.ABORTED if failed else StopReason.TERMINATED
    return Trajectory(
        attempt.task.id,
        attempt.group_id,
        [segment],
        [],
        1.0,
        stop,
        attempt=attempt.number,
        id=attempt.id,
    )


class Tasks:
    """A source of t0, t1, ... with a position."""

    def __init__(self, total: int) -> None:
        self.tasks = [Task(f"t{number}", "?") for number in range(total)]
        self.position = 0

    def take(self, count: int) -> list[Task]:
        first, self.position = self.position, min(self.position + count, len(self.tasks))
        return self.tasks[first : self.position]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Names:
    """Ids of groups, as a rollout gives them and remembers over checkpoints."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    def __call__(self, step: int, task: str) -> str:
        name = f"{step}:{task}"
        self.given[name] += 1
        assert self.given[name] == 1, "a name that was given before"
        return name

    def state_dict(self) -> dict[str, Any]:
        return {"given": dict(self.given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = Counter(state["given"])


@dataclass
class Outcome:
    """trained: (step, group's id, numbers of its usable attempts) in the timeline that survived. deaths: how often it was killed.
    seconds: of the virtual clock."""

    trained: list[tuple[int, str, tuple[int, ...]]]
    worst: int  # updates between a trained token's policy and the one in training
    deaths: int
    seconds: float
    refused: set[str]
    labels: list[int]  # of all trained tokens: version in training - version
    short: float = 0.0  # groups that ended short, over all lives
    late: set[tuple[str, int]] = field(
        default_factory=set
    )  # (group, number) of what was given up for that, over all lives


class Simulation:
    """One run from its beginning to the end of its tasks, however often it dies."""

    def __init__(self, pacing: Pacing, workload: Workload) -> None:
        self.pacing, self.workload = pacing, workload
        self.draw = random.Random(workload.seed)
        self.clock = Clock()
        self.policies = Policies()
        self.checkpoint: tuple[int, int, Any] | None = None  # step, policy, state
        self.outcome = Outcome([], 0, 0, 0.0, set(), [])

    def run(self, most_steps: int = 400) -> Outcome:
        lives: list[int | None] = [*self.workload.lives, None]
        for life in lives:
            try:
                self._live(life, most_steps)
                break
            except Killed:
                self.outcome.deaths += 1
                step = 0 if self.checkpoint is None else self.checkpoint[0]
                self.outcome.trained = [one for one in self.outcome.trained if one[0] < step]
        self.outcome.seconds = self.clock.now
        return self.outcome

    def _live(self, life: int | None, most_steps: int) -> None:
        work, source, names = self.workload, Tasks(self.workload.tasks), Names()
        step, node, state = self.checkpoint or (0, 0, None)
        player = SimulatedPlayer(work, self.clock, self.draw, node, step, life)
        player.late = self.outcome.late
        terms = Terms(
            work.samples, 1.0, lease_s=10 * work.longest_s, group_s=work.group_s, steps=most_steps
        )
        groups = Groups(
            player,
            attempt_of,
            names,
            source.take,
            self.pacing,
            terms,
            tasks=source.tasks,
            clock=self.clock,
        )
        parts = {"source": source, "groups": groups, "names": names}
        if state is not None:
            load_states(parts, put_back(*state))
        while taken := self._next(groups, step, source):
            assert step < most_steps, "it does not come to an end"
            self.outcome.short += groups.report()["rollout/groups_short"]
            self._train(step, node, taken)
            player.pass_time(work.train_s)
            node, step = self.policies.updated(node), step + 1
            player.node, player.version = node, step
            self._may_die(player)
            if step % work.checkpoint_every == 0:
                tensors: dict[str, torch.Tensor] = {}
                state = take_out(states(parts), tensors), tensors
                self._may_die(player)
                self.checkpoint = (step, node, state)
                self._may_die(player)

    def _next(self, ahead: Groups, step: int, source: Tasks) -> list[Group]:
        try:
            return ahead.step(step, self._admit)
        except RolloutError as error:  # of the last tasks not one is admitted
            if "not one of" in str(error) and source.position == len(source.tasks):
                return []
            raise

    def _may_die(self, player: SimulatedPlayer) -> None:
        """A moment at which the process may die, as any in which it asks for events."""
        player._told = player.events() + player._told

    def _train(self, step: int, node: int, groups: list[Group]) -> None:
        for group in groups:
            for one in group.usable:
                (segment,) = one.segments
                for token, version in zip(
                    segment.tokens[segment.loss_mask], segment.versions[segment.loss_mask]
                ):
                    self.outcome.worst = max(
                        self.outcome.worst, self.policies.distance(node, int(token))
                    )
                    self.outcome.labels.append(step - int(version))
            self.outcome.trained.append(
                (step, group.id, tuple(one.attempt for one in group.trajectories))
            )
            assert all(one.group_stats[0] == len(group.usable) for one in group.usable)

    def _admit(self, groups: list[Group]) -> list[Group]:
        kept = [
            group
            for group in groups
            if random.Random(f"{self.workload.seed}{group.task.id}").random()
            >= self.workload.refused
        ]
        self.outcome.refused |= {group.task.id for group in groups if group not in kept}
        return kept


def attempt_of(task: Task, group_id: str, number: int, request_id: str) -> Attempt:
    return Attempt(task, group_id, request_id, lambda turn: turn, number, f"{group_id}/{number}")
