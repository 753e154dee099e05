"""Weights for other processes: published once in buckets of memory that all reach, whole or as what
changed, and verified by hash where they are read."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.models.huggingface import combined_hash, tensor_hash
from rlflow.rollout.engine import in_portions
from rlflow.values import NonNegativeInt

logger = logging.getLogger(__name__)

BUILT_IN = dict.fromkeys(("auto", "shared_memory", "tcp"), f"{__name__}:WeightPublisher")
"""`cluster.weight_transfer`: one way, by the names of today and of before."""

BUCKET_BYTES = 2**28
MOST_CHANGED = 1 / 2
"""Of the bytes of the weights: where what changed takes more, they are offered whole alone."""
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
PLACE_BITS = 32

Words = np.ndarray[Any, Any]
"""The bits of a tensor as unsigned numbers (N,): bfloat16 as uint16."""
Change = tuple[Words, Words] | Words | None
"""Of a tensor: (where, new words), or all words; None: there is none. where: places (K,) uint32 or
uint64, or a bitmap (N / 8,) uint8."""


class Bucket(Protocol):
    """Memory that other processes reach, freed when nobody holds the bucket any more."""

    def get(self, what: str) -> list[Any]:
        """What was put into it, not to be written to. Raises RolloutError, which names `what`,
        where it does not come in time or is gone."""


@dataclass(frozen=True)
class PublishedTensor:
    """hash: `tensor_hash` of it, which two that are equal need not share."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str = field(compare=False)


@dataclass(frozen=True)
class Offer:
    """A published version. digest: that of `rlflow.models.huggingface.digest`, so two versions with
    equal weights have the same. bytes: of the tensors. tensors: by bucket. buckets: of words.
    deltas: readers keep a copy, for changes to come. changes: buckets of what leads here from the
    version whose digest is `base`; empty where the version is offered whole alone."""

    version: int
    digest: str
    bytes: int
    tensors: tuple[tuple[PublishedTensor, ...], ...]
    buckets: tuple[Bucket, ...]
    deltas: bool = False
    base: str = ""
    changes: tuple[Bucket, ...] = ()


class WeightPublisher:
    """Keeps the two newest versions for readers, and waits for none of them; what a reader has of
    an earlier version stays until it lets go.

    put: makes a bucket. delta: offers what changed since the version before, bit for bit.
    full_every: versions that are a multiple of it are offered whole alone; 0: none."""

    def __init__(
        self,
        put: Callable[[list[Any]], Bucket],
        delta: bool = False,
        full_every: NonNegativeInt = 0,
    ) -> None:
        self._put, self._delta, self._full_every = put, delta, full_every
        self._held: deque[Offer] = deque()

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Offer:
        """Makes the (HuggingFace name, tensor) pairs the newest version.

        Takes them in the caller's thread, a bucket at a time: making them may be a collective.
        Where this raises, the newest version is still the one before. Raises RolloutError."""
        if len(self._held) == 2:
            self._held.popleft()  # first: the new version takes its memory
        whole = not self._delta or (self._full_every and version % self._full_every == 0)
        base = self._held[-1] if self._held and not whole else None
        tensors: list[tuple[PublishedTensor, ...]] = []
        buckets: list[Bucket] = []
        changes: list[Bucket] = []
        size = changed = 0
        for pairs in in_portions(on_cpu(weights, version), BUCKET_BYTES):
            words = [words_of(tensor) for _, tensor in pairs]
            size += sum(map(bytes_of, words))
            tensors.append(tuple(described(name, tensor) for name, tensor in pairs))
            if base is not None:
                parts = changes_since(base, len(buckets), tensors[-1], words)
                changed += sum(map(bytes_of, parts))
                base = base if changed <= size * MOST_CHANGED else None
            if base is not None:
                changes.append(self._put(list(parts)))
            buckets.append(self._put(words))
        digest = combined_hash(item.hash for bucket in tensors for item in bucket)
        offer = Offer(version, digest, size, tuple(tensors), tuple(buckets), self._delta)
        if base is not None and len(base.buckets) == len(buckets):
            offer = replace(offer, base=base.digest, changes=tuple(changes))
        self._held.append(offer)
        return offer

    def close(self) -> None:
        """Lets go of all versions."""
        self._held.clear()


@dataclass(frozen=True)
class Read:
    """A version that was read. weights: (HuggingFace name, tensor) pairs in the order of their
    publication, not to be written to, and good until the next read. bytes: that came. delta: as
    what had changed."""

    weights: list[tuple[str, Tensor]]
    bytes: int
    delta: bool


class WeightReader:
    """Reads offered versions. Where deltas are offered, holds a copy of the weights that they are
    applied to."""

    def __init__(self) -> None:
        self._copy: list[list[Words]] = []  # by bucket
        self._digest = ""  # of the copy; empty while it is that of no version

    def read(self, offer: Offer) -> Read:
        """All tensors of a version, each verified by its hash before any is handed on. Raises
        RolloutError: one is not what was published, or a bucket does not come."""
        read = None
        if offer.changes and offer.base == self._digest:
            read = self._changed(offer)
        return read or self._whole(offer)

    def _changed(self, offer: Offer) -> Read | None:
        """None where the copy, or what changed, is damaged."""
        changes = fetched(offer, offer.changes)
        self._digest = ""
        try:
            for words, parts in zip(self._copy, changes, strict=True):
                for held, part in zip(words, parts, strict=True):
                    apply(part, held)
            weights = verified(offer, self._copy)
        except (IndexError, ValueError, RolloutError) as error:
            logger.warning("%s What had changed does not lead to it: it is read whole.", error)
            return None
        self._digest = offer.digest
        return Read(weights, sum(bytes_of(part) for parts in changes for part in parts), True)

    def _whole(self, offer: Offer) -> Read:
        self._copy, self._digest = [], ""
        words = fetched(offer, offer.buckets)
        if offer.deltas:
            words = [[np.array(part) for part in parts] for parts in words]
        weights = verified(offer, words)
        if offer.deltas:
            self._copy, self._digest = words, offer.digest
        return Read(weights, offer.bytes, False)


def on_cpu(weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
    """The pairs with their tensors on the CPU, contiguous. Raises RolloutError where a name comes
    twice."""
    names: set[str] = set()
    for name, tensor in weights:
        if name in names:
            raise RolloutError(
                f"weights of version {version}: '{name}' came twice; expected every tensor once."
            )
        names.add(name)
        yield name, tensor.detach().cpu().contiguous()


def described(name: str, tensor: Tensor) -> PublishedTensor:
    """What a reader has to know of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PublishedTensor(name, dtype, tuple(tensor.shape), tensor_hash(name, tensor))


def words_of(tensor: Tensor) -> Words:
    """The words of a contiguous tensor on the CPU, sharing its memory."""
    return tensor.view(-1).view(WORDS[tensor.element_size()]).numpy()


def fetched(offer: Offer, buckets: Sequence[Bucket]) -> list[list[Any]]:
    """What is in the buckets of an offer. Raises RolloutError."""
    kind = "what changed in weights" if buckets is offer.changes else "weights"
    return [
        bucket.get(f"{kind} of version {offer.version}, bucket {number} of {len(buckets)}")
        for number, bucket in enumerate(buckets, start=1)
    ]


def verified(offer: Offer, words: Sequence[Sequence[Words]]) -> list[tuple[str, Tensor]]:
    """The tensors of an offer, sharing the memory of their words. Raises RolloutError unless each
    is what was published."""
    found = []
    for items, parts in zip(offer.tensors, words, strict=True):
        for item, part in zip(items, parts, strict=True):
            tensor = _as_tensor(item, part)
            if tensor is None or tensor_hash(item.name, tensor) != item.hash:
                raise RolloutError(
                    f"weights of version {offer.version}: expected '{item.name}' as {item.dtype} "
                    f"of shape {item.shape} with the hash {item.hash[:12]}, found {part.nbytes} "
                    "bytes that are not it: it was damaged on its way. Read it again."
                )
            found.append((item.name, tensor))
    return found


def _as_tensor(item: PublishedTensor, words: Words) -> Tensor | None:
    """None where these are not so many words."""
    dtype = getattr(torch, item.dtype)
    if (words.size, words.itemsize) != (math.prod(item.shape), dtype.itemsize):
        return None
    return mapped(words).view(dtype).view(item.shape)


def mapped(array: Words) -> Tensor:
    """A tensor in the memory of an array, which may be memory that is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no such memory
        return torch.from_numpy(array)


def changes_since(
    base: Offer, number: int, items: Sequence[PublishedTensor], words: Sequence[Words]
) -> Sequence[Change]:
    """What changed in a bucket since the version before; all words where that had other tensors."""
    before = base.tensors[number] if number < len(base.tensors) else ()
    if tuple(before) != tuple(items):
        return words
    old = base.buckets[number].get(f"weights of version {base.version}, the one before")
    return [
        None if was.hash == item.hash else change(then, now)
        for was, item, then, now in zip(before, items, old, words, strict=True)
    ]


def change(old: Words, new: Words) -> Change:
    """What turns `old` into `new`, in the form that takes the fewest bytes. Words are compared as
    bits: minus zero is not zero, and a NaN is equal to itself."""
    changed = old != new
    count = int(np.count_nonzero(changed))
    if not count:
        return None
    if count * PLACE_BITS < len(new):
        wide = len(new) > 2**PLACE_BITS
        where = np.flatnonzero(changed).astype(np.uint64 if wide else np.uint32)
    else:
        where = np.packbits(changed)
    words = new[changed]
    return (where, words) if where.nbytes + words.nbytes < new.nbytes else new


def apply(part: Change, words: Words) -> None:
    """Writes a change into words that it was made for. Raises IndexError or ValueError where it was
    made for others."""
    if isinstance(part, tuple):
        where, new = part
        bitmap = where.dtype == np.uint8
        words[np.unpackbits(where, count=len(words)).view(bool) if bitmap else where] = new
    elif part is not None:
        words[:] = part


def bytes_of(part: Change) -> int:
    """That a change takes, or words."""
    if part is None:
        return 0
    return part.nbytes if isinstance(part, np.ndarray) else sum(array.nbytes for array in part)
