"""The trainer's weights on their way to vLLM: files in memory of bounded size, and the names that have to arrive."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.errors import ModelError, RolloutError, did_you_mean
from rlflow.models.architecture import huggingface_shapes, stored_architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.rollout.engine import Weights, check_weight, each_weight
from rlflow.storage.memory_folders import OwnedFolder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NAMES_TOLD = 5


class WeightNames:
    """Which tensors an update of a model consists of: those that its config.json implies, the head in any case.

    Where head and embedding are one tensor, vLLM keeps a packed copy as its head, which a new embedding alone leaves as it is."""

    def __init__(self, path: str | Path) -> None:
        config = read_config(path)
        try:
            stored = huggingface_shapes(stored_architecture(config))
        except ModelError:  # a family that vLLM knows and rlflow does not
            stored = WeightFiles(path).shapes()
        self.tied = EMBEDDING in stored and (HEAD not in stored or bool(config.get("tie_word_embeddings")))
        self._shapes = {**stored, HEAD: stored[EMBEDDING]} if self.tied else stored
        self.expected = frozenset(self._shapes)

    def check(self, name: str, tensor: Tensor, sent: set[str]) -> None:
        """Raises ModelError for a tensor that is none of the model's, or was sent already; vLLM would fail for good."""
        if name not in self.expected:
            raise ModelError(f"engine.load_weights: unknown tensor '{name}'.{did_you_mean(name, self.expected)}")
        if name in sent:
            raise ModelError(f"engine.load_weights: tensor '{name}' came twice; expected every tensor once.")
        check_weight(name, tensor, self._shapes[name])

    def check_complete(self, received: set[str]) -> None:
        """Raises ModelError where vLLM received fewer or other tensors than the model has: it would keep the old ones, and say
        nothing."""
        for names, what in (
            (self.expected - received, "did not arrive"),
            (received - self.expected, "are not the model's"),
        ):
            if names:
                told = ", ".join(sorted(names)[:NAMES_TOLD]) + (", ..." if len(names) > NAMES_TOLD else "")
                raise ModelError(
                    f"engine.load_weights: {len(names)} of {len(self.expected)} tensors {what}: {told}; vLLM would go on with "
                    "the old values of what is missing. Send every tensor of the model in every update."
                )


class Buckets:
    """Safetensors files in /dev/shm (in the folder of temporary files where there is none), one at a time."""

    def __init__(self, limit_bytes: int, parent: Path | None = None) -> None:
        """parent: another folder to be in."""
        self._limit = limit_bytes
        self._owned = OwnedFolder("weights", parent, others=parent is None)
        self._folder = self._owned.path
        self._number = 0

    def close(self) -> None:
        """Removes the folder."""
        self._owned.close()

    async def messages(self, weights: Weights, names: WeightNames) -> AsyncIterator[dict[str, Any]]:
        """Fields of one `update` after another: the path of a file of at most `limit_bytes` (a larger tensor is alone in its
        file), which is gone when the next is asked for. Of a tied model the head follows its embedding.

        Raises ModelError for a tensor that is none of the model's, RolloutError where there is no room."""
        held: dict[str, Tensor] = {}
        size = 0
        async for name, tensor in with_head(weights, names):
            tensor = tensor.detach().cpu().contiguous()
            if held and size + tensor.nbytes > self._limit:
                async for path in self._written(held):
                    yield {"path": str(path)}
                held, size = {}, 0
            held[name] = tensor
            size += tensor.nbytes
        if held:
            async for path in self._written(held):
                yield {"path": str(path)}

    async def _written(self, tensors: dict[str, Tensor]) -> AsyncIterator[Path]:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._number += 1
        path = self._folder / f"{self._number}.safetensors"
        try:
            try:
                await asyncio.to_thread(save_file, tensors, path)
            except (OSError, SafetensorError) as error:
                size, free = (
                    sum(tensor.nbytes for tensor in tensors.values()) >> 20,
                    shutil.disk_usage(self._folder).free >> 20,
                )
                raise RolloutError(
                    f"weight sync: {path}: {size} MiB of tensors cannot be written ({error}); {free} MiB are free there. Make "
                    "rollout.engine.bucket_mib smaller, or that file system larger."
                ) from None
            yield path
        finally:
            path.unlink(missing_ok=True)


async def with_head(weights: Weights, names: WeightNames) -> AsyncIterator[tuple[str, Tensor]]:
    """The pairs, each checked, and of a tied model the head after its embedding. Raises ModelError."""
    head: Tensor | None = None
    sent: set[str] = set()
    async for name, tensor in each_weight(weights):
        names.check(name, tensor, sent)
        if name == EMBEDDING and names.tied:
            head = tensor.clone()  # a file holds no tensor twice
        sent.add(name)
        yield name, tensor
    if head is not None and HEAD not in sent:
        yield HEAD, head
