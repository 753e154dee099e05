"""The filter with which a run takes part in a swarm: it shares its groups and trains on some of its
peers'."""

from __future__ import annotations

import dataclasses
import logging
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.dynamic_sampling import scores_alike
from rlflow.errors import ConfigError
from rlflow.rollout.codec import Transcripts, transcribe
from rlflow.rollout.rollout import Rollout
from rlflow.types import Group, Task
from rlflow.values import Component, NonNegativeInt, PositiveInt
from rlflow_environments.swarm.messages import PEER_NAME, MessageError, dump, load
from rlflow_environments.swarm.transport import TRANSPORT, ExperienceTransport

logger = logging.getLogger(__name__)
TRIES = 4  # groups that are played per group that is wanted
REMEMBERED = 4096  # digests of what has come


@dataclass
class Shared:
    """A peer's transcript that waits to be chosen, and the step in which it came."""

    peer: str
    step: int
    text: str  # the message, for a checkpoint
    transcript: Transcripts


@dataclass
class Swarm(Filter):
    """A step of `local` groups of one's own and `external` ones of others, both drawn uniformly
    (arXiv 2509.08721, algorithm 1).

    Own groups are published as text. Others' are played through the environment of this run, which
    scores them, and are in this run's tokens with log-probs unknown: kernels need `anchor:
    proximal`, their ratio is then 1 before the first update. Groups whose attempts score alike by
    that are passed over. Statistics are those of the attempts that could be played.

    local: None keeps all that the step sampled. fill: what stands in for external groups that there
    are too few of: more of one's own, as far as there are any, or a `smaller` step. publish: groups
    per step at the most. tasks: of which tasks others' groups may be: `known`, those of this run's
    `split` (as this run has them, so that a peer has no say in what is right), or `any`, where the
    question and what the verifier goes by are the peer's. pool, per_peer: transcripts that wait, in
    all and of one peer; the oldest give way, and those that came over `max_age_steps` ago. So long
    doubles are known."""

    whole_step = True
    unscored = True
    needs = frozenset({"proximal"})
    counters = (
        "swarm_published",
        "swarm_received",
        "swarm_rejected",
        "swarm_unplayable",
        "swarm_alike",
        "swarm_external",
        "swarm_missing",
    )

    rollout: Rollout
    seed: int
    transport: Annotated[Component, TRANSPORT]
    peer: str | None = None
    local: PositiveInt | None = None
    external: NonNegativeInt = 4
    fill: Literal["local", "smaller"] = "local"
    publish: NonNegativeInt = 8
    tasks: Literal["known", "any"] = "known"
    split: str = "train"
    pool: PositiveInt = 64
    per_peer: PositiveInt = 32
    max_age_steps: PositiveInt = 16
    _step = 0

    def __post_init__(self) -> None:
        if self.peer is not None and not PEER_NAME.fullmatch(self.peer):
            raise ConfigError(
                f"swarm.peer: expected up to 64 letters, digits, - and _, found '{self.peer}'."
            )
        self._peer = self.peer or secrets.token_hex(6)
        self._own = {self._peer}  # and the names before it was resumed
        self._transport: ExperienceTransport = TRANSPORT.build(
            self.transport, "swarm.transport", peer=self._peer
        )
        self._pool: dict[str, Shared] = {}  # by digest, oldest first
        self._seen: dict[str, int] = {}  # digest -> the step in which it came, oldest first

    def __call__(self, groups: list[Group]) -> list[Group]:
        draw = random.Random(f"{self.seed}/swarm/{self._step}")
        self._share(groups, draw)
        self._take_in()
        external = self._choose(draw)
        missing = self.external - len(external)
        self.counted["swarm_external"] += len(external)
        self.counted["swarm_missing"] += missing
        self._step += 1
        if self.local is None:
            return [*groups, *external]
        wanted = self.local + (missing if self.fill == "local" else 0)
        return [*draw.sample(groups, min(wanted, len(groups))), *external]

    def report(self) -> dict[str, float]:
        """Groups published, received, rejected, chosen, missing, and with equal scores; attempts
        that could not be played."""
        pool = float(len(self._pool))
        return {**super().report(), "swarm_pool": pool, **self._transport.report()}

    def close(self) -> None:
        """Leaves the swarm."""
        self._transport.close()

    def state_dict(self) -> dict[str, Any]:
        """What waits, what has come before, the name and the number of steps."""
        waiting = [[shared.step, shared.text] for shared in self._pool.values()]
        own = {"peer": self._peer, "names": sorted(self._own)}
        return {**own, "step": self._step, "pool": waiting, "seen": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the name is that of the configuration, or a new one. What waited
        and is no longer accepted, of a task that is gone for one, is left out with a warning."""
        self._own |= {state["peer"], *state.get("names", ())}
        self._step = int(state["step"])
        self._seen = {digest: int(step) for digest, step in state["seen"].items()}
        self._pool = {}
        for step, text in state["pool"]:
            try:
                message = load(text.encode())
                transcript = self._own_terms(message.transcript)
            except MessageError as error:
                logger.warning("swarm: a transcript that waited is left out: %s", error)
                continue
            self._pool[message.digest] = Shared(message.peer, int(step), text, transcript)

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        return {task.id: task for task in self.rollout.environment.tasks(self.split)}

    def _share(self, groups: list[Group], draw: random.Random) -> None:
        own = [group for group in groups if any(one.source == "local" for one in group.usable)]
        messages = []
        for group in draw.sample(own, min(self.publish, len(own))):
            sampled = [one for one in group.trajectories if one.source == "local"]
            shared = Group(group.id, group.task, sampled)
            message = dump(transcribe(shared, self.rollout.tokenizer.eos_ids), self._peer)
            if len(message) <= self._transport.max_bytes:
                messages.append(message)
        self.counted["swarm_published"] += len(messages)
        self._transport.publish(messages)

    def _take_in(self) -> None:
        for content in self._transport.receive():
            try:
                message = load(content)
                shared = Shared(
                    message.peer, self._step, content.decode(), self._own_terms(message.transcript)
                )
            except MessageError:
                self.counted["swarm_rejected"] += 1
                continue
            if message.peer in self._own or message.digest in self._seen:
                continue
            self.counted["swarm_received"] += 1
            self._seen[message.digest] = self._step
            self._pool[message.digest] = shared
            same = [digest for digest, other in self._pool.items() if other.peer == shared.peer]
            if len(same) > self.per_peer:
                del self._pool[same[0]]
        oldest = self._step - self.max_age_steps
        self._pool = dict(
            [item for item in self._pool.items() if item[1].step >= oldest][-self.pool :]
        )
        self._seen = dict([item for item in self._seen.items() if item[1] >= oldest][-REMEMBERED:])

    def _own_terms(self, transcript: Transcripts) -> Transcripts:
        """The transcript with this run's own task where it has it. Raises MessageError for a task
        that is not accepted."""
        task = self._tasks.get(transcript.task.id)
        if task is not None:
            if task.prompt != transcript.task.prompt:
                raise MessageError("another question under the id of one of ours")
        elif self.tasks == "any":
            task = transcript.task
            if isinstance(task.prompt, str):  # the tokenizer quotes messages
                prompt = self.rollout.tokenizer.without_control(task.prompt)
                task = dataclasses.replace(task, prompt=prompt)
        else:
            raise MessageError("a task that this run does not have")
        return dataclasses.replace(transcript, task=task)

    def _choose(self, draw: random.Random) -> list[Group]:
        """Up to `external` groups with a spread of scores, in random order; what was played does
        not come again."""
        order = draw.sample(list(self._pool), len(self._pool))[: TRIES * self.external]
        found: list[Group] = []
        while order and len(found) < self.external:
            count = self.external - len(found)
            digests, order = order[:count], order[count:]
            names = {
                f"swarm.{self._step}.{digest}:{self._pool[digest].transcript.task.id}": digest
                for digest in digests
            }
            transcripts = {name: self._pool[digest].transcript for name, digest in names.items()}
            for group in self.rollout.replay(transcripts):
                said = self._pool.pop(names[group.id]).transcript.attempts
                self.counted["swarm_unplayable"] += len(said) - len(group.trajectories)
                if scores_alike(group):
                    self.counted["swarm_alike"] += 1
                else:
                    found.append(group)
        return found
