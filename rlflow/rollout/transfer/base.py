"""The two ends of a weight transfer: who publishes versions, and who reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from rlflow.errors import RolloutError


@dataclass(frozen=True)
class Published:
    """What was published. bytes: of the tensors. seconds: that it took, making the tensors
    included. digest: of names, dtypes, shapes and contents; two versions with equal weights have
    the same."""

    version: int
    bytes: int
    seconds: float
    digest: str


class Closed(ABC):
    """Is closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Publisher(Closed):
    """Keeps the two newest versions of the weights for readers, who come for them when they like;
    it waits for none of them."""

    address: str
    """What `open_reader` takes: shm:FOLDER, or tcp://HOST:PORT. It holds no secret."""

    key: str = ""
    """What `open_reader` takes beside it where readers prove who they are. A secret: it belongs in
    the arguments of an actor, or in a file."""

    @abstractmethod
    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Published:
        """Makes the (HuggingFace name, tensor) pairs the newest version.

        Takes them in the caller's thread, one at a time: making them may be a collective. Readers
        see all of a version or none of it; where this raises, the newest version is still the one
        before. Raises RolloutError."""

    @abstractmethod
    def close(self) -> None:
        """Ends the offer, and removes what it took; who reads goes on with what he has open in
        shared memory."""


class NotYetError(RolloutError):
    """The version has not been published yet."""


class WeightReader(Closed):
    """Reads versions that a publisher keeps. Used by one thread at a time; several readers are
    several objects."""

    version: int | None = None
    """Of the last `read`."""
    bytes_read: int = 0
    """Of tensors, and of what came in their place, since this was opened."""
    delta: bool = False
    """Whether the last version came as what had changed; else it came whole."""

    @abstractmethod
    def newest(self, timeout_s: float = 0.0) -> int | None:
        """The newest version, waited for; None where there is none in time. Raises RolloutError:
        the publisher is gone."""

    @abstractmethod
    def read(
        self, version: int | None = None, timeout_s: float = 60.0
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs in the order in which they were published, each verified by its hash
        before it is handed on.

        version: None is the newest; `self.version` says which one that was as soon as this returns.
        timeout_s: until the version is there, and for each piece of it. Tensors are on the CPU and
        may be kept and written to. Raises RolloutError: the version is not there, or not any more;
        a tensor is not what was published; the publisher is gone."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections. Tensors that were read stay valid."""
