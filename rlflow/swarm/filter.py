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
from rlflow.codec import Transcripts, transcribe
from rlflow.components import TRANSPORT
from rlflow.errors import ConfigError
from rlflow.rollout.rollout import Rollout
from rlflow.swarm.messages import PEER_NAME, MessageError, dump, load
from rlflow.swarm.transport import ExperienceTransport
from rlflow.types import Group, Task
from rlflow.values import Component, NonNegativeInt, PositiveInt

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

    def __init__(
        self,
        rollout: Rollout,
        seed: int,
        transport: Annotated[Component, TRANSPORT],
        peer: str | None = None,
        local: PositiveInt | None = None,
        external: NonNegativeInt = 4,
        fill: Literal["local", "smaller"] = "local",
        publish: NonNegativeInt = 8,
        tasks: Literal["known", "any"] = "known",
        split: str = "train",
        pool: PositiveInt = 64,
        per_peer: PositiveInt = 32,
        max_age_steps: PositiveInt = 16,
    ) -> None:
        if peer is not None and not PEER_NAME.fullmatch(peer):
            raise ConfigError(
                f"swarm.peer: expected up to 64 letters, digits, - and _, found '{peer}'."
            )
        self._rollout, self._seed = rollout, seed
        self._peer = peer or secrets.token_hex(6)
        self._own = {self._peer}  # and the names before it was resumed
        self._local, self._external, self._fill, self._publish = local, external, fill, publish
        self._any_task, self._split = tasks == "any", split
        self._most, self._per_peer, self._max_age_steps = pool, per_peer, max_age_steps
        self._transport: ExperienceTransport = TRANSPORT.build(
            transport, "swarm.transport", peer=self._peer
        )
        self._step = 0
        self._pool: dict[str, Shared] = {}  # by digest, oldest first
        self._seen: dict[str, int] = {}  # digest -> the step in which it came, oldest first
        self._counts = dict.fromkeys(
            ("published", "received", "rejected", "unplayable", "alike", "external", "missing"), 0
        )

    def __call__(self, groups: list[Group]) -> list[Group]:
        draw = random.Random(f"{self._seed}/swarm/{self._step}")
        self._share(groups, draw)
        self._take_in()
        external = self._choose(draw)
        missing = self._external - len(external)
        self._counts["external"] += len(external)
        self._counts["missing"] += missing
        self._step += 1
        if self._local is None:
            return [*groups, *external]
        wanted = self._local + (missing if self._fill == "local" else 0)
        return [*draw.sample(groups, min(wanted, len(groups))), *external]

    def report(self) -> dict[str, float]:
        """Groups published, received, rejected, chosen, missing, and with equal scores; attempts
        that could not be played."""
        counted = {f"swarm_{name}": float(value) for name, value in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return {**counted, "swarm_pool": float(len(self._pool)), **self._transport.report()}

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
        return {task.id: task for task in self._rollout.environment.tasks(self._split)}

    def _share(self, groups: list[Group], draw: random.Random) -> None:
        own = [group for group in groups if any(one.source == "local" for one in group.usable)]
        messages = []
        for group in draw.sample(own, min(self._publish, len(own))):
            sampled = [one for one in group.trajectories if one.source == "local"]
            transcript = transcribe(
                Group(group.id, group.task, sampled), self._rollout.tokenizer.eos_ids
            )
            message = dump(transcript, self._peer)
            if len(message) <= self._transport.max_bytes:
                messages.append(message)
        self._counts["published"] += len(messages)
        self._transport.publish(messages)

    def _take_in(self) -> None:
        for content in self._transport.receive():
            try:
                message = load(content)
                shared = Shared(
                    message.peer, self._step, content.decode(), self._own_terms(message.transcript)
                )
            except MessageError:
                self._counts["rejected"] += 1
                continue
            if message.peer in self._own or message.digest in self._seen:
                continue
            self._counts["received"] += 1
            self._seen[message.digest] = self._step
            self._pool[message.digest] = shared
            same = [digest for digest, other in self._pool.items() if other.peer == shared.peer]
            if len(same) > self._per_peer:
                del self._pool[same[0]]
        oldest = self._step - self._max_age_steps
        self._pool = dict(
            [item for item in self._pool.items() if item[1].step >= oldest][-self._most :]
        )
        self._seen = dict([item for item in self._seen.items() if item[1] >= oldest][-REMEMBERED:])

    def _own_terms(self, transcript: Transcripts) -> Transcripts:
        """The transcript with this run's own task where it has it. Raises MessageError for a task
        that is not accepted."""
        task = self._tasks.get(transcript.task.id)
        if task is not None:
            if task.prompt != transcript.task.prompt:
                raise MessageError("another question under the id of one of ours")
        elif self._any_task:
            task = dataclasses.replace(
                transcript.task, prompt=_quoted(transcript.task, self._rollout)
            )
        else:
            raise MessageError("a task that this run does not have")
        return dataclasses.replace(transcript, task=task)

    def _choose(self, draw: random.Random) -> list[Group]:
        """Up to `external` groups with a spread of scores, in random order; what was played does
        not come again."""
        order = draw.sample(list(self._pool), len(self._pool))[: TRIES * self._external]
        found: list[Group] = []
        while order and len(found) < self._external:
            count = self._external - len(found)
            digests, order = order[:count], order[count:]
            names = {
                f"swarm.{self._step}.{digest}:{self._pool[digest].transcript.task.id}": digest
                for digest in digests
            }
            for group in self._rollout.replay(
                {name: self._pool[digest].transcript for name, digest in names.items()}
            ):
                shared = self._pool.pop(names[group.id])
                self._counts["unplayable"] += len(shared.transcript.attempts) - len(
                    group.trajectories
                )
                if scores_alike(group):
                    self._counts["alike"] += 1
                else:
                    found.append(group)
        return found


def _quoted(task: Task, rollout: Rollout) -> Any:
    """The prompt of another's task, without a control token in it."""
    if isinstance(task.prompt, str):
        return rollout.tokenizer.without_control(task.prompt)
    return task.prompt  # the tokenizer quotes messages
