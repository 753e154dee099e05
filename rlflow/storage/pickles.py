"""Reading the pickles of a checkpoint by a list of allowed names: nothing in a file can run
code."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
CLASSES_OF_METADATA = {
    # Megatron's subclass of Metadata
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    # And of SavePlan, in older versions
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    # Megatron keeps the plans of all ranks there, to reuse them in its next save
    # (dist_checkpointing/strategies/state_dict_saver.py, `all_local_plans`).
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in DTYPES),
}
"""All that torch's own writer and Megatron's put into `.metadata`."""
STAND_INS = {
    ("_codecs", "encode"),
    ("_io", "BytesIO"),
    ("argparse", "Namespace"),
    ("collections", "defaultdict"),
    *((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((module, "scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("pathlib", "PosixPath"),
    ("signal", "Signals"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "device"),
    # A tensor with attributes, such as an optimizer's main parameters
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch.nn.parameter", "Parameter"),
    ("types", "SimpleNamespace"),
    *(("torch", name) for name in DTYPES),
}
"""What torch.save and Megatron put into other pickles (arguments, tensors, states of generators).
Read as `Inert`, as is every name of Megatron and of Transformer Engine: none of them is imported,
none of them is called."""


class ForbiddenName(pickle.UnpicklingError):
    """The pickle names something that could do more than hold data."""


class Inert:
    """An object of a pickle that was not built: what it was called with, and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __init__(self, *arguments: Any) -> None:
        """Not called for every kind of pickled object; `__new__` is."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dict's subclass are not kept."""

    def append(self, value: Any) -> None:
        """Items of a list's subclass are not kept."""


class Items(dict):
    """An OrderedDict of a pickle, such as a module's state, without the attributes that it had."""

    def __setstate__(self, state: Any) -> None:
        """Attributes are not kept."""


@dataclass(frozen=True)
class Storage:
    """A persistent id of torch.save: class (such as FloatStorage), file name within the archive,
    elements."""

    kind: str
    key: str
    elements: int


@lru_cache(maxsize=256)
def _stand_in(name: str) -> type[Inert]:
    return type(name, (Inert,), {})


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle of torch.save with `Inert` in place of every object but Python's own
    containers and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return Items
        package = module.split(".")[0]
        storage = module in ("torch", "torch.storage") and name.endswith("Storage")
        if (module, name) in STAND_INS or storage or package in ("megatron", "transformer_engine"):
            return _stand_in(name)
        raise ForbiddenName(f"names {module}.{name}, which has no place there; not loaded")

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", type() as kind, key, _, elements):
                return Storage(kind.__name__, str(key), int(elements))
        raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")


class MetadataUnpickler(pickle.Unpickler):
    """Reads a `.metadata` with `Inert` in place of its objects, and refuses whatever could do more
    than describe tensors.

    The classes themselves are not imported: torch.distributed would cost a second and 50 MiB."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CLASSES_OF_METADATA:
            raise ForbiddenName(
                f".metadata names {module}.{name}, which has no place there; not loaded"
            )
        return _stand_in(name)


@dataclass(frozen=True)
class Chunk:
    """One stored chunk of a tensor: its box there, and the byte range of a file that it is
    somewhere in (in a torch_dist checkpoint an archive of torch.save, in others its elements
    alone)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Table:
    """A `.metadata` in plain words. tensors: {name: (shape, name of the dtype, chunks)}; objects:
    {name: (file, first byte, bytes)} of what else it describes, where it has a place; extents:
    (file, first byte, bytes) of everything that is stored."""

    tensors: dict[str, tuple[tuple[int, ...], str, tuple[Chunk, ...]]]
    objects: dict[str, tuple[str, int, int]]
    extents: tuple[tuple[str, int, int], ...]


def read_metadata(file: IO[bytes]) -> Table:
    """The tables of a `.metadata`. Raises ForbiddenName, or another error of DAMAGE for a damaged
    one: a chunk or an object without a place in a file, something in a file that is not described,
    and whatever unpickling raises."""
    tables = MetadataUnpickler(file).load().state
    places = {}
    for index, info in tables["storage_data"].items():
        at = index.state.get("offset")  # of objects: left at its default, so not in the pickle
        places[index.state["fqn"], None if at is None else _numbers(at)] = (
            _path(info.state["relative_path"]),
            int(info.state["offset"]),
            int(info.state["length"]),
        )
    extents = tuple(places.values())
    tensors, objects = {}, {}
    for name, entry in tables["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            objects[name] = places.pop((name, None))
            continue
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets = _numbers(chunk.state["offsets"])
            chunks.append(
                Chunk(offsets, _numbers(chunk.state["sizes"]), *places.pop((name, offsets)))
            )
        kind = entry.state["properties"].state[0]
        tensors[name] = (_numbers(entry.state["size"]), kind.__name__, tuple(chunks))
    if places:
        raise ValueError(f"'{min(places, key=str)[0]}' is stored but not described")
    return Table(tensors, objects, extents)


def _numbers(size: Inert) -> tuple[int, ...]:
    """The content of a torch.Size."""
    return tuple(map(int, size.arguments[0])) if size.arguments else ()


def _path(found: Any) -> str:
    return "/".join(map(str, found.arguments)) if isinstance(found, Inert) else str(found)


DAMAGE = (
    pickle.PickleError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    OverflowError,
    MemoryError,
    AssertionError,
    RuntimeError,
)
"""What reading a damaged pickle or zip raises; ForbiddenName is one of them and comes first in an
except chain."""
