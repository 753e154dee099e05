"""From an address to its reader, and from where the readers are to a publisher."""

from __future__ import annotations

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.base import Publisher, WeightReader
from rlflow.rollout.transfer.shared_memory import SharedMemoryPublisher, SharedMemoryReader
from rlflow.rollout.transfer.signed_tcp import TcpPublisher
from rlflow.rollout.transfer.tcp_reader import TcpReader


def open_reader(address: str, key: str = "", timeout_s: float = 60.0) -> WeightReader:
    """The reader of a publisher's `address` and `key`; nothing is read yet. timeout_s: of each step
    of a connection.

    Raises RolloutError for another kind of address."""
    if address.startswith("shm:"):
        return SharedMemoryReader(address)
    if address.startswith("tcp://"):
        return TcpReader(address, key, timeout_s)
    raise RolloutError(
        f"weight transfer: expected an address shm:FOLDER or tcp://HOST:PORT, found '{address}'."
    )


def fitting_publisher(host: str | None = None) -> Publisher:
    """Shared memory; TCP where readers may be on other machines, which call this one `host`."""
    return SharedMemoryPublisher() if host is None else TcpPublisher(host=host)
