"""Ray's object store as the memory that weights are published in."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psutil

from rlflow.cluster.session import first_line
from rlflow.errors import RolloutError
from rlflow.rollout.weights import bytes_of

logger = logging.getLogger(__name__)

RAYS_SHARE = 0.3  # of the memory, by default
GET_S = 120.0  # for a bucket to come from another machine
SMALL = "give it more memory (a container: --shm-size; a cluster: ray start --object-store-memory)"


@dataclass(frozen=True)
class StoredBucket:
    """Values in Ray's object store, kept for as long as somebody holds this. bytes: of them,
    about."""

    reference: Any
    bytes: int

    def get(self, what: str) -> list[Any]:
        """The values: on the machine that put them they are mapped, to others they are copied once
        for all of its processes. Raises RolloutError where they do not come within GET_S."""
        import ray

        try:
            return ray.get(self.reference, timeout=GET_S)
        except ray.exceptions.GetTimeoutError:
            raise RolloutError(
                f"{what}: waited {GET_S:g} s for {self.bytes >> 20} MiB from Ray's object store; "
                "is the network between the machines as fast as it should be, and their store "
                "large enough?"
            ) from None
        except ray.exceptions.RayError as error:
            raise RolloutError(
                f"{what}: is no longer in Ray's object store ({first_line(error)}); read the "
                "newest."
            ) from None


def put(values: list[Any]) -> StoredBucket:
    """Copies words or changes into Ray's object store. Raises RolloutError where it has no
    room."""
    import ray

    if not ray.is_initialized():  # ray.put would start another one
        raise RolloutError("weights: Ray was left; rollout workers that are closed take none.")
    size = sum(map(bytes_of, values))
    try:
        return StoredBucket(ray.put(values), size)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise RolloutError(
            f"weights: {size >> 20} MiB do not fit into Ray's object store of "
            f"{store_bytes() >> 20} MiB, nor on the disk that it falls back to "
            f"({first_line(error)}); {SMALL}."
        ) from None


def room_for(needed: int) -> dict[str, int]:
    """The option of ray.init for a store of so many bytes, as far as the memory that processes
    share has room; nothing where Ray takes as much by itself."""
    free = int(0.95 * psutil.disk_usage("/dev/shm").free)
    usual = RAYS_SHARE * psutil.virtual_memory().total
    return {"object_store_memory": min(needed, free)} if min(needed, free) > usual else {}


def check_room(needed: int) -> None:
    """Warns where a machine of the cluster has a smaller object store: Ray writes to disk then."""
    found = store_bytes()
    if found < needed:
        logger.warning(
            "weights: two versions and what is under way take %d MiB, and the smallest object "
            "store of Ray here has %d MiB: Ray writes the rest to disk, which is slower; %s.",
            needed >> 20, found >> 20, SMALL,
        )  # fmt: skip


def store_bytes() -> int:
    """Of the smallest object store in the cluster."""
    import ray

    sizes = [node["Resources"].get("object_store_memory") for node in ray.nodes() if node["Alive"]]
    return int(min((size for size in sizes if size), default=0))
