"""The torch_dist format written by torch's own writer, in a thread of this process if wished.

Megatron's writer starts a `spawn` process, which imports `__main__` again: a script without a main
guard would hang, and every save would pay for an import of torch. Here the ranks agree on who
writes what (`begin`), each writes its own file without talking to the others, and together they
finish (`OngoingWrite.finish`): training may go on in between."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner

from rlflow.errors import StorageError
from rlflow.storage.integrity import (
    TRAINER_MANIFEST,
    Fingerprint,
    error_reason,
    fingerprint,
    write_manifest,
)
from rlflow.trainer.megatron.cpu import device

logger = logging.getLogger(__name__)

FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError)
"""What torch's writer raises: the system's errors, and its own zip writer's RuntimeError on a full
disk."""


class PlannedWriter(FileSystemWriter):
    """torch's writer (one file per rank, synced to disk) that keeps the plan until it is told to
    write."""

    plan: SavePlan
    planner: SavePlanner

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.plan, self.planner = plan, planner

    def write(self) -> tuple[list[Any], dict[str, Fingerprint]]:
        """Writes this rank's file; returns what torch wants to know about it, and its
        fingerprint."""
        results = self.write_data(self.plan, self.planner).wait()
        prefix = self.plan.storage_data.prefix
        return results, {
            file.name: fingerprint(file) for file in Path(self.path).glob(f"{prefix}*")
        }


class OngoingWrite:
    """A checkpoint that this rank is writing its part of. With `background`, in a thread that no
    exit waits for."""

    def __init__(
        self,
        path: Path,
        writer: PlannedWriter,
        metadata: Any,
        manifest: Mapping[str, Any],
        background: bool,
    ) -> None:
        self.path, self._writer, self._metadata, self._manifest = path, writer, metadata, manifest
        self._outcome: tuple[list[Any], dict[str, Fingerprint]] | None = None
        self._failure = "the writing thread ended early"
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            self._outcome = self._writer.write()
        except FAILURES as error:
            logger.debug("writing %s failed", self.path, exc_info=True)
            self._failure = error_reason(error)

    def finished_everywhere(self) -> bool:
        """Whether every rank has written its part, or failed to. A collective."""
        finished = torch.tensor(int(not self._thread.is_alive()), device=device())
        dist.all_reduce(finished, dist.ReduceOp.MIN)
        return bool(finished)

    def finish(self) -> None:
        """Waits for all ranks; then the first one writes the tables and the manifest.

        A collective. Raises StorageError on all ranks where any of them failed (a full disk, no
        permission)."""
        if self._thread.ident is not None:
            self._thread.join()
        # torch's writer fails in ways of its own on every rank; only the first one's tables make
        # the checkpoint.
        outcome = (
            self._outcome
            if self._outcome is not None
            else f"rank {dist.get_rank()}: {self._failure}"
        )
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, outcome)
        failures = [outcome for outcome in gathered if isinstance(outcome, str)]
        if not failures and dist.get_rank() == 0:
            failures = self._write_tables(gathered)
        _raise_everywhere(self.path, failures)

    def _write_tables(self, gathered: list[tuple[Any, dict[str, Fingerprint]]]) -> list[str]:
        files = {name: print_ for _, written in gathered for name, print_ in written.items()}
        try:
            self._writer.finish(self._metadata, [results for results, _ in gathered])
            # Part of the format; nothing here is common and not sharded
            torch.save({}, self.path / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(self.path))
            for name in (".metadata", "common.pt", "metadata.json"):
                files[name] = fingerprint(self.path / name)
            write_manifest(self.path / TRAINER_MANIFEST, self._manifest, files)
        except FAILURES as error:
            return [error_reason(error)]
        return []


def begin(
    path: Path, content: ShardedStateDict, manifest: Mapping[str, Any], background: bool
) -> OngoingWrite:
    """Starts writing what the ranks hold. A collective; without `background` every rank has written
    when it returns.

    With it, the tensors are copied to host memory first: training may change them at once."""
    sharded, common = save_preprocess(content)
    assert not common, f"not sharded: {sorted(common)}"
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    for entry in itertools.chain(*flat.values()) if background else ():
        if isinstance(entry, ShardedTensor):
            entry.data = entry.data.detach().to("cpu", copy=True)
    writer = PlannedWriter(path)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planned = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(flat, False), writer, planner=planner
    )
    return OngoingWrite(path, writer, planned[0][1], manifest, background)


def prepare_folder(path: Path, own_files: tuple[str, ...]) -> None:
    """Makes the folder and removes what an earlier save left in it. A collective; raises
    StorageError on all ranks."""
    failures = []
    if dist.get_rank() == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            for file in (file for pattern in own_files for file in path.glob(pattern)):
                file.unlink()
        except OSError as error:
            failures = [error_reason(error)]
    _raise_everywhere(path, failures)


def _raise_everywhere(path: Path, failures: list[str]) -> None:
    """Raises what the first rank knows of, on every rank."""
    known: list[Any] = [failures]
    dist.broadcast_object_list(known, src=0)
    if known[0]:
        raise StorageError(f"{path}: the checkpoint cannot be written ({known[0][0]}).")
