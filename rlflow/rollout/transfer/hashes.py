"""Hashes of the bytes of tensors. xxh3 finds accidents at the speed of memory; blake3 and sha256 find forgeries too."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

from rlflow.errors import MissingPackageError

HashName = Literal["auto", "xxh3", "blake3", "sha256"]
MOST_THREADS = 4
PACKAGES = {"xxh3": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}
"""What each needs beside the standard library: package, its function."""


class Hash(Protocol):
    """As those of hashlib."""

    def update(self, content: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def hashing_threads() -> ThreadPoolExecutor:
    """Threads for parts of a tensor: a hash takes twice as long as a copy, and neither holds Python's lock."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "rlflow-hash")


def best_hash(name: HashName = "auto") -> str:
    """The name itself; of "auto" xxh3 where the package xxhash is installed, else sha256, which is ten times slower.

    Raises MissingPackageError."""
    if name == "auto":
        return "xxh3" if importlib.util.find_spec("xxhash") is not None else "sha256"
    hash_function(name)
    return name


def hash_function(name: str) -> Callable[[], Hash]:
    """What makes a new hash of that name. Raises MissingPackageError; KeyError for a name that is none."""
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
