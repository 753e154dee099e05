"""The deltas of the last few versions, made beside the training that goes on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.delta import make_delta
from rlflow.rollout.transfer.hashes import hash_of
from rlflow.rollout.transfer.manifest import DTYPES, Manifest
from rlflow.rollout.transfer.pins import Pin

DENSITY = 0.1
"""Share of changed words above which no delta is made (arXiv 2605.15565). At a third a delta is as
large as the weights."""
MOST_DELTAS = 8
LARGEST_SHARE = 1 / 3  # of the weights, for several deltas together
WAIT_S = 600.0


@dataclass(frozen=True)
class Delta:
    """From the version whose digest is `base` to the one whose digest is `digest`. blobs: with
    their hashes."""

    base: str
    digest: str
    blobs: tuple[tuple[bytes, str], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(blob) for blob, _ in self.blobs)


class DeltaHistory:
    """Makes the delta to each new version in a thread of its own. blob_bytes: of a blob, about."""

    def __init__(self, blob_bytes: int) -> None:
        self._blob_bytes = blob_bytes
        self._deltas: deque[Delta] = deque(maxlen=MOST_DELTAS)
        self._thread: threading.Thread | None = None

    def start(self, old: Pin, new: Pin) -> None:
        """Begins the delta between two versions, which it holds until it is done."""
        self.wait()
        self._thread = threading.Thread(
            target=self._make, args=(old, new), name="rlflow-delta", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for the delta under way. Raises RolloutError."""
        thread = self._thread
        if thread is not None:
            thread.join(WAIT_S)
            if thread.is_alive():
                raise RolloutError(
                    f"weight transfer: a delta between two versions was not made in {WAIT_S:g} s."
                )

    def path(self, base: str, manifest: Manifest) -> list[Delta] | None:
        """The deltas that lead from a digest to a version, in order; None where there are none, or
        they are not worth it."""
        self.wait()
        found: list[Delta] = []
        wanted = manifest.digest
        for delta in reversed(list(self._deltas)):
            if wanted == base:
                break
            if delta.digest == wanted:
                found.insert(0, delta)
                wanted = delta.base
        worth_it = sum(delta.size for delta in found) <= LARGEST_SHARE * manifest.size
        return found if wanted == base and worth_it else None

    def _make(self, old: Pin, new: Pin) -> None:
        first, second = old.manifest, new.manifest
        if first.layout != second.layout:
            return
        blobs = make_delta(old.content, new.content, word_of(second), DENSITY, self._blob_bytes)
        if blobs is not None:
            hashed = tuple((blob, hash_of(second.hash, blob)) for blob in blobs)
            self._deltas.append(Delta(first.digest, second.digest, hashed))


def word_of(manifest: Manifest) -> int:
    """Bytes of the words that are compared: 4 where every tensor has elements of 4 or 8 bytes, else
    2."""
    return 4 if all(DTYPES[item.dtype].itemsize % 4 == 0 for item in manifest.tensors) else 2
