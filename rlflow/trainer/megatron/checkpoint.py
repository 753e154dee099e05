"""Checkpoints by megatron-core's dist_checkpointing: written in one layout, read in any."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from rlflow.errors import CheckpointError
from rlflow.trainer.megatron.optimizer import load_distributed, set_updates, sharded_distributed
from rlflow.trainer.megatron.world import World
from rlflow.weights.families import Architecture
from rlflow.weights.pickles import read_metadata

MANIFEST = "trainer.json"
"""Written last: the step, the layout, the model's dimensions, and the size of every other file."""
OWN_FILES = ("*.distcp", ".metadata", "metadata.json", "common.pt", MANIFEST)


@dataclass
class TrainerState:
    """Everything that a checkpoint holds. `updates`: optimizer steps so far (the schedule follows from it)."""

    world: World
    architecture: Architecture
    module: GPTModel
    optimizer: MegatronOptimizer
    snapshots: dict[str, dict[str, Tensor]]
    updates: int
    step: int


class InProcessSave(SaveShardedStrategy):
    """The torch_dist format written by torch's own writer in this process.

    Megatron's writer starts a `spawn` process, which imports `__main__` again: a script without a main guard would hang,
    and every save would pay for an import of torch."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    def can_handle_sharded_objects(self) -> bool:
        return True


def save(path: Path, state: TrainerState) -> None:
    """Writes the checkpoint into `path`, in place of one that stands there. A collective.

    Raises CheckpointError where it cannot be written (a full disk, no permission)."""
    with _explained(f"{path}: the checkpoint cannot be written"):
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            for file in (file for pattern in OWN_FILES for file in path.glob(pattern)):
                file.unlink()
        dist.barrier()
        dist_checkpointing.save(_sharded(state), str(path), sharded_strategy=InProcessSave())
        dist.barrier()
        if dist.get_rank() == 0:
            _write_manifest(path, state)
        dist.barrier()


def load(path: Path, state: TrainerState) -> TrainerState:
    """Loads the checkpoint into the module and optimizer of `state`; returns it with the loaded snapshots and counts.

    Raises CheckpointError where the directory is missing, incomplete or damaged, or holds another model."""
    manifest = read_manifest(path)
    _check_same_model(path, manifest["model"], dataclasses.asdict(state.architecture))
    saved = bool(manifest.get("distributed_optimizer", False))
    if saved != distributed(state):
        raise CheckpointError(
            f"{path}: written with trainer.distributed_optimizer={str(saved).lower()}, found "
            f"{str(distributed(state)).lower()}; the two keep Adam's state in different forms. Set it as it was."
        )
    parameters = dict(state.module.named_parameters())
    snapshots = {
        name: {key: torch.empty_like(parameter.data) for key, parameter in parameters.items()}
        for name in manifest["snapshots"]
    }
    target = dataclasses.replace(
        state, snapshots=snapshots, updates=int(manifest["updates"]), step=int(manifest["step"])
    )
    same_layout = manifest["layout"] == _layout(state.world)
    with _explained(f"{path}: damaged, use an earlier checkpoint"), without_code(path):
        loaded = dist_checkpointing.load(_sharded(target, with_rng=same_layout, is_loading=True), str(path))
    _restore(target, loaded, same_layout)
    return target


@contextmanager
def without_code(path: Path) -> Iterator[None]:
    """Inside, nothing in the checkpoint can run code: torch reads its objects as `weights_only`, whatever its callers ask for
    (torch.distributed asks for False), and its unguarded `.metadata` was read by a guarded reader first."""
    with (path / ".metadata").open("rb") as file:
        read_metadata(file)
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns what megatron-core and torch raise about checkpoints (theirs is a BaseException) into a CheckpointError."""
    try:
        yield
    except (
        CheckpointException,
        CheckpointingException,
        RuntimeError,
        KeyError,
        ValueError,
        EOFError,
        OSError,
        pickle.PickleError,
    ) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(cause).strip().splitlines()
        raise CheckpointError(
            f"{what} ({type(cause).__name__}: {reason[0] if reason else 'no reason given'})."
        ) from error


def _check_same_model(path: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    for key, value in present.items():
        if saved.get(key) != value:
            raise CheckpointError(
                f"{path}: belongs to another model; its {key} is {saved.get(key)}, that of model.path is {value}."
            )


def read_manifest(path: Path) -> dict[str, Any]:
    """The checkpoint's manifest. Raises CheckpointError unless every file is there in its full size."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint.")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: incomplete, {MANIFEST} is missing; it is written last. Use an earlier checkpoint."
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST}: damaged ({error}). Use an earlier checkpoint.") from None
    for name, size in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise CheckpointError(
                f"{path / name}: {'missing' if found is None else f'{found} bytes'}, {size} bytes expected. "
                "Use an earlier checkpoint."
            )
    return manifest


def _write_manifest(path: Path, state: TrainerState) -> None:
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
    content = {
        "step": state.step,
        "updates": state.updates,
        "layout": _layout(state.world),
        "model": dataclasses.asdict(state.architecture),
        "distributed_optimizer": distributed(state),
        "snapshots": sorted(state.snapshots),
        "files": files,
    }
    (path / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def _layout(world: World) -> dict[str, int]:
    return {
        "tensor_parallel": world.tensor_parallel,
        "pipeline_parallel": world.pipeline_parallel,
        "data_parallel": world.data_parallel,
    }


def _sharded(state: TrainerState, with_rng: bool = True, is_loading: bool = False) -> ShardedStateDict:
    """Megatron's description of which part of which global tensor this rank holds."""
    # The unwrapped module: the keys of the DDP wrapper carry a prefix and do not load back.
    content: ShardedStateDict = {
        "model": state.module.sharded_state_dict(),
        "optimizer": _sharded_optimizer(state, is_loading),
    }
    for name, values in state.snapshots.items():
        content[f"snapshot.{name}"] = {
            key: dataclasses.replace(entry, key=f"snapshot.{name}.{entry.key}", data=values[key])
            for key, entry in state.module.sharded_state_dict().items()
            if key in values
        }
    if with_rng:
        content["rng"] = _sharded_rng(state.world)
    return content


def _sharded_optimizer(state: TrainerState, is_loading: bool) -> ShardedStateDict:
    parameters = state.module.sharded_state_dict()
    if not distributed(state):
        return state.optimizer.sharded_state_dict(parameters)
    return sharded_distributed(state.optimizer, parameters, is_loading)


def distributed(state: TrainerState) -> bool:
    """Whether the optimizer's state is split over data-parallel ranks."""
    return bool(state.optimizer.config.use_distributed_optimizer)


def _sharded_rng(world: World) -> ShardedObject:
    """The states of Megatron's generators, one per tensor x pipeline rank."""
    shape = (world.pipeline_parallel, world.tensor_parallel)
    offset = (world.pipeline_rank, world.tensor_rank)
    return ShardedObject("rng", get_cuda_rng_tracker().get_states(), shape, offset, replica_id=world.data_rank)


def _restore(state: TrainerState, loaded: dict[str, Any], with_rng: bool) -> None:
    state.module.load_state_dict(loaded["model"])
    for name, values in state.snapshots.items():
        for key, value in loaded[f"snapshot.{name}"].items():
            values[key].copy_(value)
    # Learning rate, betas and weight decay stay those of this run's configuration, not the checkpoint's.
    groups = state.optimizer.param_groups
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if distributed(state):
        load_distributed(state.optimizer, loaded["optimizer"])
    else:
        # Megatron leaves a count of 0 out of the checkpoint, and torch insists on one. (bfloat16 wraps the float32 optimizer.)
        adam = loaded["optimizer"].get("optimizer", loaded["optimizer"])
        adam["state"].setdefault("common_step", torch.tensor(0.0))
        state.optimizer.load_state_dict(loaded["optimizer"])
    for group, options in zip(state.optimizer.param_groups, kept, strict=True):
        group.update(options)
    set_updates(state.optimizer, state.updates)
    if with_rng:
        get_cuda_rng_tracker().set_states(loaded["rng"])
