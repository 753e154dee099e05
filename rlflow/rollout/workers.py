"""Messages between the driver and its rollout workers. Trajectories travel as arrays of
bytes, not as objects of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.rollout.engine import Completion, PauseMode
from rlflow.rollout.weight_sync import ProbeQuestions
from rlflow.rollout.weights import Offer

if TYPE_CHECKING:
    from rlflow.rollout.players import Begun


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself when its engine and its environment are there. max_tokens: of an
    episode, None without a limit; max_concurrency: episodes that are worth playing at a time; pid:
    of its process, on its own machine; hashes_weights: whether it verifies by itself what it takes
    over, or answers a probe."""

    max_tokens: int | None
    max_concurrency: int
    pid: int
    hashes_weights: bool = True


@dataclass(frozen=True)
class Update:
    """Weights that a worker is to take over. mode: what becomes of requests in flight. questions:
    of the probe, where the engine cannot hash its weights."""

    offer: Offer
    mode: PauseMode = "keep"
    questions: ProbeQuestions | None = None

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.offer.version


@dataclass(frozen=True)
class Loaded:
    """A version that a worker took over. answers: to the probe's questions, which the driver
    compares; None where the engine has verified its weights by their hash. bytes: that were read.
    delta: as what had changed. read_s: until all were there and verified; load_s: of the engine,
    its verification or the probe included."""

    version: int
    answers: Sequence[Completion] | None = None
    bytes: int = 0
    delta: bool = False
    read_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class PlayedAttempt:
    """An attempt that is over: the bytes of its trajectory, uint8 (bytes,)."""

    request_id: str
    payload: Any


@dataclass(frozen=True)
class WorkerNews:
    """What a worker answers when it is looked at."""

    begun: tuple[Begun, ...] = ()
    ended: tuple[PlayedAttempt, ...] = ()
