"""The interface of a way to the swarm's peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rlflow.components import Kind

TRANSPORT = Kind("transport", "rlflow_environments.swarm", reserved=("peer",))


class ExperienceTransport(ABC):
    """Carries messages of at most `max_bytes` bytes to and from peers, best effort: any may be
    lost, doubled or come in another order. Neither call waits for a peer or fails because of one:
    training goes on without them."""

    max_bytes: int

    @abstractmethod
    def publish(self, messages: Sequence[bytes]) -> None:
        """Hands the messages over to be sent."""

    @abstractmethod
    def receive(self) -> list[bytes]:
        """What has come since the last call, oldest first, a bounded number; others' bytes, not
        looked into."""

    def report(self) -> dict[str, float]:
        """Numbers since the last call."""
        return {}

    def close(self) -> None:
        """Frees connections and threads."""
