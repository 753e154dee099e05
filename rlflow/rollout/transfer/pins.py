"""Versions that are held: as long as anything of one is alive, its publisher does not write over
it."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

import numpy as np

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.base import NotYetError
from rlflow.rollout.transfer.manifest import Manifest, decode_manifest
from rlflow.storage.memory_folders import lock, owner_lives

POLL_S = 0.01
GRACE_S = 10.0


class Pin:
    """A version, held. content: (size,) uint8, private to this process: what is written to it
    others do not see; the lock is on the mapping, and is freed with the last array or tensor that
    shares it."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        self.manifest = manifest
        self.content = np.empty(0, np.uint8)
        if manifest.size:
            if os.fstat(descriptor).st_size < manifest.size:
                raise RolloutError(
                    f"weight transfer: version {manifest.version}: its slot was cut short."
                )
            # The mapping keeps the lock of the file that it was made from.
            mapping = mmap.mmap(
                descriptor, manifest.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
            self.content = np.frombuffer(mapping, np.uint8)


def versions_in(folder: Path) -> list[tuple[int, int, Path]]:
    """(number of the publication, version, file), oldest first. Raises RolloutError where the
    folder is gone."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise RolloutError(
            f"weight transfer: {folder}: cannot be read ({error.strerror}); its publisher has ended, or is on another machine."
        ) from None
    found = []
    for name in names:
        number, _, version = name.partition(".")
        if number.isdecimal() and version.removeprefix("-").isdecimal():
            found.append((int(number), int(version), folder / name))
    return sorted(found)


def wait_for_version(folder: Path, version: int | None, timeout_s: float) -> Path | None:
    """The file of a version (None: the newest), None where it is not there in time. Raises
    RolloutError: it is no longer there, or the publisher is gone."""
    end = time.monotonic() + timeout_s
    while True:
        found = versions_in(folder)
        chosen = [path for _, number, path in found if version in (None, number)]
        if chosen:
            return chosen[-1]
        lives = owner_lives(folder)
        there = ", ".join(str(number) for _, number, _ in versions_in(folder)) or "none"
        if not lives and not versions_in(folder) > found:
            raise RolloutError(
                f"weight transfer: {folder}: its publisher has ended; versions that are left: {there}."
            )
        if version is not None and found and version < max(number for _, number, _ in found):
            raise RolloutError(
                f"weight transfer: {folder}: version {version} is no longer there, found {there}; read the newest."
            )
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)


def pin(folder: Path, version: int | None, timeout_s: float) -> Pin:
    """Holds a version; None is the newest. Raises RolloutError where it is not there in time."""
    end = time.monotonic() + timeout_s
    while True:
        path = wait_for_version(folder, version, max(0.0, end - time.monotonic()))
        if path is None:
            what = "any version" if version is None else f"version {version}"
            raise NotYetError(
                f"weight transfer: {folder}: waited {timeout_s:g} s for {what} to be published."
            )
        held = _try_to_pin(path)
        if held is not None:
            return held
        if time.monotonic() > end + GRACE_S:
            raise RolloutError(
                f"weight transfer: {path}: its slot cannot be held; expected a file that nobody writes to."
            )
        time.sleep(POLL_S / 10)  # written over in the meantime: another is the newest


def _try_to_pin(path: Path) -> Pin | None:
    try:
        slot, _, content = path.read_bytes().partition(b"\n")
        with open(slot, "rb", buffering=0) as file:
            if lock(file.fileno(), fcntl.LOCK_SH) and path.exists():
                return Pin(decode_manifest(content, str(path)), file.fileno())
    except FileNotFoundError:
        pass
    return None
