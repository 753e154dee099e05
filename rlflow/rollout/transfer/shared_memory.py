"""Weights in the memory of one machine: written once, mapped by every reader, copied by none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from rlflow.rollout.transfer.base import Published, Publisher, WeightReader
from rlflow.rollout.transfer.hashes import HashName, Helpers, best_hash, hash_of
from rlflow.rollout.transfer.manifest import as_tensor, compare, parts
from rlflow.rollout.transfer.pins import Pin, pin, versions_in, wait_for_version
from rlflow.rollout.transfer.store import Store
from rlflow.values import PositiveFloat, PositiveInt

SCHEME = "shm:"


class SharedMemoryPublisher(Publisher):
    """For readers on the same machine.

    directory: None is /dev/shm; elsewhere: where versions go if that is too small, None is the
    folder of temporary files. Each holds two versions, and what readers still hold of earlier ones.
    hash: auto is xxh3, or sha256 without the package xxhash. part_mib: has a hash of its own.
    readers_s: how long `publish` waits where readers hold more than two earlier versions."""

    def __init__(
        self,
        directory: str | None = None,
        elsewhere: str | None = None,
        hash: HashName = "auto",
        part_mib: PositiveInt = 4,
        readers_s: PositiveFloat = 60.0,
    ) -> None:
        self._store = Store(directory, elsewhere, best_hash(hash), part_mib << 20, readers_s)
        self.address = f"{SCHEME}{self._store.folder}"

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Published:
        """See `Publisher.publish`. Each tensor is copied once, beside the two versions there is
        never more than one."""
        began = time.monotonic()
        manifest = self._store.write(weights, version)
        return Published(version, manifest.nbytes, time.monotonic() - began, manifest.digest)

    def close(self) -> None:
        """Removes the folder."""
        self._store.close()


class SharedMemoryReader(WeightReader):
    """Tensors are mapped, not copied: they hold their version in memory for as long as they
    live."""

    def __init__(self, address: str) -> None:
        self._folder = Path(address.removeprefix(SCHEME))
        self._helpers = Helpers()

    def newest(self, timeout_s: float = 0.0) -> int | None:
        """See `WeightReader.newest`."""
        if wait_for_version(self._folder, None, timeout_s) is None:
            return None
        return versions_in(self._folder)[-1][1]

    def read(
        self, version: int | None = None, timeout_s: float = 60.0
    ) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReader.read`."""
        held = pin(self._folder, version, timeout_s)
        self.version = held.manifest.version
        return self._tensors(held)

    def close(self) -> None:
        """Ends the threads that hash."""
        self._helpers.close()

    def _tensors(self, held: Pin) -> Iterator[tuple[str, Tensor]]:
        manifest = held.manifest
        for item in manifest.tensors:
            content = held.content[item.start : item.start + item.nbytes]
            hashes = self._helpers.map(
                lambda span: hash_of(manifest.hash, content[slice(*span)]),  # noqa: B023 -- done here
                parts(len(content), manifest.part_bytes),
            )
            for number, found in enumerate(hashes):
                compare(item, number, found, manifest, str(self._folder))
            self.bytes_read += len(content)
            yield item.name, as_tensor(item, content)
