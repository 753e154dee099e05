"""The two newest versions of the weights, in memory that processes of a machine share; no reader
sees half of one.

    FOLDER/owner                locked by the publisher while it lives; where it is free the folder may be removed
    FOLDER/N.slot               the tensors of a version
    FOLDER/NUMBER.VERSION       the place of the slot, and the manifest; there while the slot holds all of the version

Who reads a slot holds a shared lock on it (flock), for as long as a tensor of it is alive. The
publisher removes the manifest, then locks the slot to write to it; one that is being read it leaves
to its readers and takes a new file. So nobody waits for a reader, no reader sees two versions in
one, and the kernel frees the locks of whoever is killed."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.transfer.hashes import Helpers, hash_function
from rlflow.rollout.transfer.manifest import Manifest, PublishedTensor, aligned, content_of, parts
from rlflow.rollout.transfer.slots import NO_ROOM, SlotFile
from rlflow.storage.files import write_text
from rlflow.storage.memory_folders import OwnedFolder, remove_leftovers, shared_memory

logger = logging.getLogger(__name__)

PREFIX = "published"
CHUNK_BYTES = 2**18  # copied, and hashed while it is in the cache
MOST_LEFT = 2  # earlier versions that readers may still hold while a new one is written
POLL_S = 0.02
GROWTH_BYTES = 2**26


@dataclass
class Version:
    """What is offered: a slot, what it holds, and the file that says so."""

    slot: SlotFile
    manifest: Manifest
    path: Path


class Store:
    """Keeps the two newest versions in a folder of its own.

    directory: where the folder is made; None: /dev/shm. elsewhere: where slots go if that has no
    room; None: the folder of temporary files. hash_name: of `hashes`. readers_s: how long readers
    are waited for that hold too many earlier versions."""

    def __init__(
        self,
        directory: str | None,
        elsewhere: str | None,
        hash_name: str,
        part_bytes: int,
        readers_s: float,
    ) -> None:
        parent = Path(directory) if directory else shared_memory()
        self._elsewhere = Path(elsewhere or tempfile.gettempdir())
        self.hash, self.hash_name = hash_function(hash_name), hash_name
        self.part_bytes, self._readers_s = part_bytes, readers_s
        self.helpers = Helpers()
        remove_leftovers(self._elsewhere)
        try:
            self._folders = [OwnedFolder(PREFIX, parent)]
        except OSError as error:
            raise ConfigError(
                f"weight transfer: directory: {parent}: cannot be written to ({error.strerror})."
            ) from None
        self.folder = self._slots_in = self._folders[0].path
        self._left: list[SlotFile] = []  # of earlier versions that are being read
        self._number = 0
        self.versions: list[Version] = []
        """Oldest first, two at most."""

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Makes the pairs the newest version; see `Publisher.publish`. Beside the slots never more
        than a tensor is held."""
        self._number += 1
        writing = _Writing(self, self._free_slot(version), version)
        try:
            manifest = writing.fill(weights)
            path = self.folder / f"{self._number:09d}.{version}"
            writing.slot.unlock()
            write_text(path, f"{writing.slot.path}\n{manifest.encode().decode()}", durable=False)
        except BaseException:
            writing.slot.close()
            raise
        self.versions.append(Version(writing.slot, manifest, path))
        return manifest

    def close(self) -> None:
        """Removes the folder."""
        self.helpers.close()
        for slot in [*(held.slot for held in self.versions), *self._left]:
            slot.close()
        self.versions, self._left = [], []
        for folder in self._folders:
            folder.close()

    def _free_slot(self, version: int) -> SlotFile:
        """A locked slot: that of the older version if nobody reads it, else a new one."""
        self._forget_left(version)
        size = self.versions[-1].manifest.size if self.versions else GROWTH_BYTES
        if len(self.versions) > 1:
            oldest = self.versions.pop(0)
            # Before the lock: who reads it from now on finds that it is gone
            oldest.path.unlink(missing_ok=True)
            if oldest.slot.lock():
                return oldest.slot
            oldest.slot.path.unlink(missing_ok=True)
            self._left.append(oldest.slot)
        return self.new_slot(size, version)

    def _forget_left(self, version: int) -> None:
        """Closes the slots whose readers are done. Raises RolloutError where too many are not."""
        end = time.monotonic() + self._readers_s
        while True:
            for slot in [slot for slot in self._left if slot.lock()]:
                self._left.remove(slot)
                slot.close()
            if len(self._left) <= MOST_LEFT:
                return
            if time.monotonic() > end:
                raise RolloutError(
                    f"weight transfer: version {version} cannot be published: readers have held {len(self._left)} earlier "
                    f"versions ({_mib(sum(len(slot.content) for slot in self._left))} MiB) for {self._readers_s:g} s, expected "
                    f"at most {MOST_LEFT}. Do workers hang, or keep the tensors that they read? What is kept should be copied."
                )
            time.sleep(POLL_S)

    def new_slot(self, size: int, version: int) -> SlotFile:
        """A locked slot of that size, elsewhere where there is no room for it here. Raises
        RolloutError."""
        name = f"{secrets.token_hex(4)}.slot"
        try:
            return SlotFile(self._slots_in / name, size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        here = self._slots_in
        try:
            if here == self.folder:
                self._folders.append(OwnedFolder(PREFIX, self._elsewhere))
                self._slots_in = self._folders[-1].path
                slot = SlotFile(self._slots_in / name, size)
                logger.warning(
                    "weight transfer: %s has %d MiB free, and a version needs %d: it is kept in %s, which is slower. Make %s "
                    "larger (a container: --shm-size), or set `directory`.",
                    here, _free(here), _mib(size), self._slots_in, here,
                )  # fmt: skip
                return slot
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        raise RolloutError(
            f"weight transfer: there is no room for version {version}: {_mib(size)} MiB are needed, {_free(here)} MiB are free "
            f"in {here}, {_free(self._elsewhere)} MiB in {self._elsewhere}. Make one larger (a container: --shm-size), or set "
            "`directory` or `elsewhere` to a folder that has room for two versions of the weights."
        )


class _Writing:
    """One version on its way into a slot, which is exchanged for another where it has no room."""

    def __init__(self, store: Store, slot: SlotFile, version: int) -> None:
        self.slot = slot
        self._store, self._version = store, version

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copies the tensors in, one after another, each part hashed while it is copied. Raises
        RolloutError."""
        stored: dict[str, PublishedTensor] = {}
        end = 0
        for name, tensor in weights:
            if name in stored:
                raise RolloutError(
                    f"weight transfer: version {self._version}: '{name}' came twice; expected every tensor once."
                )
            content = content_of(tensor)
            start, before = aligned(end), end
            end = start + len(content)
            self._make_room(end)
            self.slot.content[before:start] = 0
            hashes = self._store.helpers.map(
                lambda span: self._copy(content[slice(*span)], start + span[0]),  # noqa: B023 -- done here
                parts(len(content), self._store.part_bytes),
            )
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored[name] = PublishedTensor(name, dtype, tuple(tensor.shape), start, tuple(hashes))
        self.slot.cut(end)
        return Manifest(
            self._version,
            end,
            self._store.part_bytes,
            self._store.hash_name,
            tuple(stored.values()),
        )

    def _copy(self, content: np.ndarray, start: int) -> str:
        """Copies a part and returns its hash."""
        content_hash = self._store.hash()
        for first, last in parts(len(content), CHUNK_BYTES):
            chunk = self.slot.content[start + first : start + last]
            chunk[:] = content[first:last]
            content_hash.update(chunk)
        return content_hash.hexdigest()

    def _make_room(self, size: int) -> None:
        have = len(self.slot.content)
        if size <= have:
            return
        larger = max(size, have + min(have, GROWTH_BYTES))
        try:
            self.slot.grow(larger)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            old, self.slot = self.slot, self._store.new_slot(larger, self._version)
            for first, last in parts(have, CHUNK_BYTES):
                self.slot.content[first:last] = old.content[first:last]
            old.close()


def _mib(size: int) -> int:
    return -(-size // 2**20)


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free >> 20
