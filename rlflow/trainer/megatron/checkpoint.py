"""Checkpoints by megatron-core's dist_checkpointing: written in one layout, read in any."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlflow.errors import CheckpointError, DamagedCheckpointError
from rlflow.models.architecture import Architecture
from rlflow.storage.integrity import (
    TRAINER_MANIFEST,
    find_damage,
    read_fingerprints,
    read_sealed,
)
from rlflow.storage.pickles import read_metadata
from rlflow.trainer.lora import check_identity
from rlflow.trainer.megatron import adam_state, adapters, writing
from rlflow.trainer.megatron.model import (
    PolicyModel,
    named_parameters,
    prefixed,
    trained_parameters,
)
from rlflow.trainer.megatron.optimizer import set_updates
from rlflow.trainer.megatron.world import World
from rlflow.trainer.megatron.writing import OngoingWrite

OWN_FILES = ("*.distcp", ".metadata", "metadata.json", "common.pt", TRAINER_MANIFEST)
FORMAT = 3


@dataclass
class TrainerState:
    """Everything that a checkpoint holds. `modules`: this rank's model chunks, one per virtual
    pipeline stage. `updates`: optimizer steps so far (the schedule follows from it). `lora`: what
    `rlflow.trainer.lora.identity` says of the adapters, which then are all that is held; None: the
    weights are. `biases`: snapshots have those of routers too, which move."""

    world: World
    architecture: Architecture
    modules: Sequence[PolicyModel]
    optimizer: MegatronOptimizer
    snapshots: dict[str, dict[str, Tensor]]
    updates: int
    step: int
    lora: dict[str, Any] | None = None
    biases: bool = False


def begin_save(path: Path, state: TrainerState, background: bool) -> OngoingWrite:
    """Begins to write the checkpoint into `path`, in place of one that stands there; `finish` makes
    it one. A collective.

    With `background` it returns once the state is copied to host memory. Raises StorageError on all
    ranks."""
    writing.prepare_folder(path, OWN_FILES)
    return writing.begin(path, _sharded(state), _manifest(state), background)


def load(
    path: Path, state: TrainerState, kept: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> TrainerState:
    """Loads the checkpoint into the modules and optimizer of `state`; returns it with the loaded
    snapshots and counts. kept: copies weights to where snapshots stay. Those of `state` that the
    checkpoint brings are dropped before, also where the load then fails: no memory for two.

    Raises DamagedCheckpointError where it is incomplete or damaged, CheckpointError where it is
    missing or holds another model."""
    manifest = read_manifest(path)
    for key, value in _described(state.architecture).items():
        if (saved := manifest["model"].get(key)) != value:
            raise CheckpointError(
                f"{path}: belongs to another model; its {key} is {saved}, that of model.path is "
                f"{value}."
            )
    check_identity(path, manifest.get("lora"), state.lora)
    _check_files(path, manifest)
    if manifest["dtype"] != _dtype(state):
        raise CheckpointError(
            f"{path}: written with model.dtype={manifest['dtype']}, found {_dtype(state)}. Set it "
            "as it was, or start a new run from an export of the old one."
        )
    biases = bool(manifest.get("router_biases"))
    trained = trained_parameters(state.modules, biases)
    values = {key: parameter.detach() for key, parameter in trained}
    for name in manifest["snapshots"]:
        state.snapshots.pop(name, None)
    snapshots = {name: kept(values) for name in manifest["snapshots"]}
    target = dataclasses.replace(
        state,
        snapshots=snapshots,
        updates=int(manifest["updates"]),
        step=int(manifest["step"]),
        biases=biases,
    )
    same_layout = manifest["layout"] == _layout(state.world)
    with _explained(path), without_code(path):
        loaded = dist_checkpointing.load(_requested(target, with_rng=same_layout), str(path))
    _restore(target, loaded, same_layout)
    return target


@contextmanager
def without_code(path: Path) -> Iterator[None]:
    """Inside, nothing in the checkpoint can run code: torch reads its objects as `weights_only`,
    whatever its callers ask for (torch.distributed asks for False), and its unguarded `.metadata`
    was read by a guarded reader first."""
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
def _explained(path: Path) -> Iterator[None]:
    """Turns what megatron-core and torch raise while they read (theirs is a BaseException) into a
    DamagedCheckpointError."""
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
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((failure[0] for failure in failures), error)
        reason = next(iter(str(cause).strip().splitlines()), "no reason given")
        raise DamagedCheckpointError(
            f"{path}: damaged ({type(cause).__name__}: {reason})."
        ) from error


def read_manifest(path: Path) -> dict[str, Any]:
    """The checkpoint's manifest. Raises DamagedCheckpointError where it is missing or damaged."""
    manifest = read_sealed(path / TRAINER_MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: a checkpoint of format {manifest.get('format')}; this version of rlflow "
            f"reads format {FORMAT}."
        )
    return manifest


def _check_files(path: Path, manifest: dict[str, Any]) -> None:
    """Each rank reads its share of the files. A collective; raises DamagedCheckpointError on all
    ranks."""
    expected = read_fingerprints(manifest, path / TRAINER_MANIFEST)
    mine = sorted(expected)[dist.get_rank() :: dist.get_world_size()]
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, find_damage(path, expected, mine))
    for damage in filter(None, found):
        raise DamagedCheckpointError(f"{damage}.")


def _manifest(state: TrainerState) -> dict[str, Any]:
    """What is known before the files are written."""
    return {
        "format": FORMAT,
        "step": state.step,
        "updates": state.updates,
        "layout": _layout(state.world),
        "model": _described(state.architecture),
        "dtype": _dtype(state),
        "snapshots": sorted(state.snapshots),
        "lora": state.lora,
        "router_biases": state.biases,
    }


def _described(model: Architecture) -> dict[str, Any]:
    """As JSON gives it back, which has no tuples."""
    return json.loads(json.dumps(dataclasses.asdict(model)))


def _dtype(state: TrainerState) -> str:
    return str(next(iter(named_parameters(state.modules)))[1].dtype).removeprefix("torch.")


def _layout(world: World) -> dict[str, int]:
    return {
        "tensor_parallel": world.tensor_parallel,
        "pipeline_parallel": world.pipeline_parallel,
        "data_parallel": world.data_parallel,
        "expert_parallel": world.layout.expert_parallel,
    }


def _entries(state: TrainerState) -> ShardedStateDict:
    """Megatron's description of which part of which global tensor this rank's modules hold, by
    parameter name."""
    # The unwrapped modules: the keys of the DDP wrapper carry a prefix and do not load back.
    whole = {
        prefix + name: entry
        for prefix, module in prefixed(state.modules)
        for name, entry in module.sharded_state_dict().items()
    }
    return whole if state.lora is None else adapters.entries(state.modules, whole)


def _merging_in_place(entry: Any) -> Any:
    """Megatron loads gate and up of an MLP apart, into views of the whole, and then copies both
    into a new one: half a copy of everything."""

    def merge(parts: list[Tensor]) -> Tensor:
        storage = entry.data.untyped_storage().data_ptr()
        loaded = all(part.untyped_storage().data_ptr() == storage for part in parts)
        return entry.data if loaded else entry.merge_fn(parts)

    if not isinstance(entry, ShardedTensorFactory):
        return entry
    return dataclasses.replace(entry, merge_fn=merge)


def _sharded(state: TrainerState) -> ShardedStateDict:
    """What this rank has to save. A collective where the optimizer's state is split over
    data-parallel ranks."""
    optimizer = adam_state.sharded_state(state.optimizer, _entries(state))
    return {**_sharded_model(state), "optimizer": optimizer, "rng": _sharded_rng(state.world)}


def _requested(state: TrainerState, with_rng: bool) -> ShardedStateDict:
    """What this rank has to load."""
    content = {
        **_sharded_model(state),
        "optimizer": adam_state.requested_state(state.optimizer, _entries(state)),
        **({"rng": _sharded_rng(state.world)} if with_rng else {}),
    }
    dict_list_map_inplace(_merging_in_place, content)
    return content


def _sharded_model(state: TrainerState) -> ShardedStateDict:
    content: ShardedStateDict = {"model": _entries(state)}
    for name, values in state.snapshots.items():
        content[f"snapshot.{name}"] = {
            key: dataclasses.replace(entry, key=f"snapshot.{name}.{entry.key}", data=values[key])
            for key, entry in _entries(state).items()
            if key in values
        }
    return content


def _sharded_rng(world: World) -> ShardedObject:
    """The states of Megatron's generators, one per tensor x pipeline rank."""
    shape = (world.pipeline_parallel, world.tensor_parallel)
    offset = (world.pipeline_rank, world.tensor_rank)
    return ShardedObject(
        "rng", get_cuda_rng_tracker().get_states(), shape, offset, replica_id=world.replica
    )


def _restore(state: TrainerState, loaded: dict[str, Any], with_rng: bool) -> None:
    """Learning rate, betas and weight decay stay those of this run's configuration: no checkpoint
    holds them."""
    for prefix, module in prefixed(state.modules):
        own = {
            name[len(prefix) :]: value
            for name, value in loaded["model"].items()
            if name.startswith(prefix)
        }
        module.load_state_dict(own, strict=state.lora is None)
    for name, values in state.snapshots.items():
        for key, value in loaded[f"snapshot.{name}"].items():
            values[key].copy_(value)
    adam_state.restore(state.optimizer, _entries(state), loaded["optimizer"])
    set_updates(state.optimizer, state.updates)
    if with_rng:
        get_cuda_rng_tracker().set_states(loaded["rng"])
