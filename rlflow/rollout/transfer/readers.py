"""From an address to its reader."""

from __future__ import annotations

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.base import WeightReader
from rlflow.rollout.transfer.shared_memory import SharedMemoryReader


def open_reader(address: str, key: str = "") -> WeightReader:
    """The reader of a publisher's `address` and `key`; nothing is read yet. Raises RolloutError for another kind of address."""
    if address.startswith("shm:"):
        return SharedMemoryReader(address)
    raise RolloutError(f"weight transfer: expected an address shm:FOLDER or tcp://HOST:PORT, found '{address}'.")
