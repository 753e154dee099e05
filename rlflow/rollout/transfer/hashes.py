"""Hashes of the bytes of tensors. xxh3 finds accidents at the speed of memory; blake3 and sha256
find forgeries too."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

from rlflow.errors import MissingPackageError

HashName = Literal["auto", "xxh3", "blake3", "sha256"]
Item = TypeVar("Item")
MOST_THREADS = 4
PACKAGES = {"xxh3": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}
"""What each needs beside the standard library: package, its function."""


class Hash(Protocol):
    """As those of hashlib."""

    def update(self, content: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class Helpers:
    """Threads that take parts of a tensor's work from the calling one, which does the rest: copies
    and hashes hold no lock of Python's. None is waited for that has not begun, as on a machine that
    is busy with other work."""

    def __init__(self) -> None:
        self._count = max(1, min(MOST_THREADS, os.cpu_count() or 1) - 1)
        self._threads = ThreadPoolExecutor(self._count, "rlflow-hash")

    def map(self, work: Callable[[Item], str], items: Iterable[Item]) -> list[str]:
        """What `work` returns for each of the items."""
        todo = deque(enumerate(items))
        found = [""] * len(todo)

        def take() -> None:
            while todo:
                try:
                    number, item = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                found[number] = work(item)

        others = [self._threads.submit(take) for _ in range(min(self._count, len(todo) - 1))]
        try:
            take()
        finally:
            begun = [other for other in others if not other.cancel()]
            for other in begun:
                other.result()
        return found

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def best_hash(name: HashName = "auto") -> str:
    """The name itself; of "auto" xxh3 where the package xxhash is installed, else sha256, which is
    ten times slower.

    Raises MissingPackageError."""
    if name == "auto":
        return "xxh3" if importlib.util.find_spec("xxhash") is not None else "sha256"
    hash_function(name)
    return name


def hash_function(name: str) -> Callable[[], Hash]:
    """What makes a new hash of that name. Raises MissingPackageError; KeyError for a name that is
    none."""
    if name == "sha256":
        return hashlib.sha256
    package, function = PACKAGES[name]
    try:
        return getattr(importlib.import_module(package), function)
    except ModuleNotFoundError:
        raise MissingPackageError(
            f"weight transfer: hashes are {name}, and the package {package} is not installed here: pip install {package}, "
            "or hash: sha256 where the weights are published."
        ) from None


def hash_of(name: str, content: Any) -> str:
    """The hash of some bytes, in hex digits."""
    content_hash = hash_function(name)()
    content_hash.update(content)
    return content_hash.hexdigest()
