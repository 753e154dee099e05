"""The trainer's weights on their way to vLLM: in buckets, through files in memory that all engines
of this process share, or on the GPUs that trainer and vLLM share."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlflow.devices.gpu_buckets import EMBEDDING
from rlflow.errors import ModelError, RolloutError, did_you_mean
from rlflow.models.architecture import huggingface_shapes, stored_architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.rollout.engine import Weights, check_weight, each_weight
from rlflow.storage.memory_folders import OwnedFolder

HEAD = "lm_head.weight"
NAMES_TOLD = 5
Bucket = Mapping[str, Tensor]


class WeightNames:
    """Which tensors an update of a model consists of: those that its config.json implies, the head
    in any case.

    Where head and embedding are one tensor, vLLM keeps a packed copy as its head, which a new
    embedding alone leaves as it is."""

    def __init__(self, path: str | Path) -> None:
        config = read_config(path)
        try:
            stored = huggingface_shapes(stored_architecture(config))
        except ModelError:  # a family that vLLM knows and rlflow does not
            stored = WeightFiles(path).shapes()
        one = HEAD not in stored or bool(config.get("tie_word_embeddings"))
        self.tied = EMBEDDING in stored and one
        self._shapes = {**stored, HEAD: stored[EMBEDDING]} if self.tied else stored
        self.expected = frozenset(self._shapes)

    def check(self, name: str, tensor: Tensor, sent: set[str]) -> None:
        """Raises ModelError for a tensor that is none of the model's, or was sent already; vLLM
        would fail for good."""
        if name not in self.expected:
            raise ModelError(
                f"engine.load_weights: unknown tensor '{name}'.{did_you_mean(name, self.expected)}"
            )
        if name in sent:
            raise ModelError(
                f"engine.load_weights: tensor '{name}' came twice; expected every tensor once."
            )
        check_weight(name, tensor, self._shapes[name])

    def check_complete(self, sent: set[str]) -> None:
        """Raises ModelError where an update has fewer tensors than the model: vLLM would keep the
        old ones, and say nothing."""
        if missing := self.expected - sent:
            more = ", ..." if len(missing) > NAMES_TOLD else ""
            told = ", ".join(sorted(missing)[:NAMES_TOLD]) + more
            raise ModelError(
                f"engine.load_weights: {len(missing)} of {len(self.expected)} tensors did not "
                f"arrive: {told}; vLLM would go on with the old values of what is missing. Send "
                "every tensor of the model in every update."
            )


class Carrier(Protocol):
    """A way for the weights of one update to an engine's server."""

    def updates(
        self, weights: Weights, names: WeightNames, limit_bytes: int
    ) -> AsyncIterator[dict[str, Any]]:
        """What the server is told about one bucket of at most `limit_bytes` after the other: it
        finds the tensors by that until the next is asked for. Raises ModelError for weights that
        are not exactly the model's, RolloutError where they cannot be handed over."""

    def close(self) -> None:
        """The update is over, one way or another."""


async def buckets(
    weights: Weights, names: WeightNames, limit_bytes: int
) -> AsyncIterator[dict[str, Tensor]]:
    """The tensors, each checked, in buckets of at most `limit_bytes` (a larger one is alone). Of a
    tied model the head follows its embedding, in another bucket. A tensor may not change before its
    bucket is done with.

    Raises ModelError for a tensor that is none of the model's, or for those that did not come."""
    held: dict[str, Tensor] = {}
    size, sent = 0, set[str]()
    async for name, tensor in each_weight(weights):
        if name == HEAD and names.tied and HEAD in sent:
            continue  # the same tensor as the embedding, which came before
        names.check(name, tensor, sent)
        parts = [name, HEAD] if name == EMBEDDING and names.tied else [name]
        for part in parts:
            if held and (size + tensor.nbytes > limit_bytes or len(parts) == 2):
                yield held
                held, size = {}, 0
            held[part] = tensor.detach()
            size += tensor.nbytes
            sent.add(part)
    if held:
        yield held
    names.check_complete(sent)


class SharedFiles:
    """Safetensors files in /dev/shm (in the folder of temporary files where there is none). Engines
    that load the same update at the same time read the same files: who comes first writes one, and
    it goes when nobody is at it or before it any more.

    parent: another folder to be in. keep: all files of an update stay until it is over."""

    def __init__(self, parent: Path | None = None, keep: bool = False) -> None:
        self._parent, self._keep = parent, keep
        self._lock = threading.Lock()
        self._owned: OwnedFolder | None = None
        self._users: list[FileCarrier] = []
        self._files: dict[tuple[int, int], Path] = {}

    def carrier(self, version: int) -> FileCarrier:
        """A carrier of the update to that version."""
        with self._lock:
            self._users.append(FileCarrier(self, version))
            return self._users[-1]

    def next_file(self, user: FileCarrier, bucket: Bucket) -> Path:
        """The file with the next bucket of a carrier's update. Raises RolloutError where there is
        no room."""
        with self._lock:
            user.number += 1
            self._discard()
            if self._owned is None:
                self._owned = OwnedFolder("weights", self._parent, others=self._parent is None)
                self._owned.path.chmod(0o700 if self._parent is None else 0o755)
            key = user.version, user.number
            if key not in self._files:
                path = self._owned.path / f"model-{user.version}-{user.number:05}.safetensors"
                _write(bucket, path)
                self._files[key] = path
            return self._files[key]

    def release(self, user: FileCarrier) -> None:
        """A carrier's update is over; with the last one the folder goes."""
        with self._lock:
            if user in self._users:
                self._users.remove(user)
            self._discard()
            if not self._users and self._owned is not None:
                self._owned.close()
                self._owned = None
                self._files.clear()

    def _discard(self) -> None:
        """Removes the files that nobody is at or before."""
        for version, number in [] if self._keep else list(self._files):
            if all(user.version != version or user.number > number for user in self._users):
                self._files.pop((version, number)).unlink(missing_ok=True)


@dataclass(eq=False)
class FileCarrier:
    """The files of one update, for one engine. See `SharedFiles`. number: of the file it is at."""

    files: SharedFiles
    version: int
    number: int = 0

    async def updates(
        self, weights: Weights, names: WeightNames, limit_bytes: int
    ) -> AsyncIterator[dict[str, Any]]:
        """Paths of files with a bucket each. See `Carrier.updates`."""
        async for bucket in buckets(weights, names, limit_bytes):
            yield await self.info(bucket)

    async def info(self, bucket: Bucket) -> dict[str, Any]:
        """The path of a file with the bucket. Raises RolloutError."""
        return {"path": str(await asyncio.to_thread(self.files.next_file, self, bucket))}

    def close(self) -> None:
        """Leaves the files to the others."""
        self.files.release(self)


def _write(bucket: Bucket, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in bucket.items()}, path)
        path.chmod(0o644)  # the folder says who may read it
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        size = sum(tensor.nbytes for tensor in bucket.values()) >> 20
        free = shutil.disk_usage(path.parent).free >> 20
        raise RolloutError(
            f"weight sync: {path}: {size} MiB of tensors cannot be written ({error}); {free} "
            "MiB are free there. Make rollout.engine.bucket_mib smaller, or that file system "
            "larger."
        ) from None
