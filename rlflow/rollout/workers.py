"""What the driver and its rollout workers say to each other. Trajectories travel as arrays of bytes, not as objects of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.rollout.engine import PauseMode
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.flow import Begun


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself when its engine and its environment are there. max_tokens: of an episode, None without a
    limit; max_concurrency: episodes that are worth playing at a time; pid: of its process, on its own machine."""

    max_tokens: int | None
    max_concurrency: int
    pid: int


@dataclass(frozen=True)
class PlayOrder:
    """Attempts for a worker. temperature, priority: None as in training. together: their requests wait for each other, so that
    equal seeds and weights give equal bits."""

    attempts: tuple[Attempt, ...]
    temperature: float | None = None
    priority: int | None = None
    together: bool = False


@dataclass(frozen=True)
class Update:
    """Weights that a worker is to take over. address, key: where a reader finds them, and what it proves itself with. mode: what
    becomes of requests in flight."""

    version: int
    address: str
    mode: PauseMode = "keep"
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class PlayedAttempt:
    """An attempt that is over: the bytes of its trajectory, uint8 (bytes,). at: seconds since 1970."""

    request_id: str
    payload: Any
    at: float


@dataclass(frozen=True)
class WorkerNews:
    """What a worker answers when it is looked at. version: of the weights that it samples from."""

    version: int
    begun: tuple[Begun, ...] = ()
    ended: tuple[PlayedAttempt, ...] = ()
