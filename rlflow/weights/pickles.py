"""Reading the pickles of a checkpoint by a list of allowed names: nothing in a file can run code."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import IO, Any

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
CLASSES_OF_METADATA = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in DTYPES),
}
"""All that torch's own writer puts into `.metadata`."""
MEGATRON_METADATA = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
"""Megatron's subclass of Metadata; read as the class itself, so that no Megatron is needed."""
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
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("types", "SimpleNamespace"),
    *(("torch", name) for name in DTYPES),
}
"""What torch.save and Megatron put into other pickles (arguments, tensors, states of generators). Read as `Inert`, as is
every name of Megatron and of Transformer Engine: none of them is imported, none of them is called."""


class ForbiddenName(pickle.UnpicklingError):
    """The pickle names something that could do more than hold data."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads a `.metadata` and refuses whatever could do more than describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == MEGATRON_METADATA:
            module, name = "torch.distributed.checkpoint.metadata", "Metadata"
        if (module, name) not in CLASSES_OF_METADATA:
            raise ForbiddenName(f".metadata names {module}.{name}, which has no place there; not loaded")
        return super().find_class(module, name)


class Inert:
    """An object of a pickle that was not built: what it was called with, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

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
    """A persistent id of torch.save: class (such as FloatStorage), file name within the archive, elements."""

    kind: str
    key: str
    elements: int


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle of torch.save with `Inert` in place of every object but Python's own containers and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return Items
        package = module.split(".")[0]
        storage = module in ("torch", "torch.storage") and name.endswith("Storage")
        if (module, name) in STAND_INS or storage or package in ("megatron", "transformer_engine"):
            return type(name, (Inert,), {})
        raise ForbiddenName(f"names {module}.{name}, which has no place there; not loaded")

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], type)):
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
        return Storage(pid[1].__name__, str(pid[2]), int(pid[4]))


def read_metadata(file: IO[bytes]) -> Any:
    """The torch.distributed.checkpoint Metadata of a `.metadata`. Raises ForbiddenName, or what a damaged pickle raises."""
    return MetadataUnpickler(file).load()


DAMAGE = (
    pickle.PickleError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ImportError,
    OverflowError,
    MemoryError,
    RecursionError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
)
"""What reading a damaged pickle or zip raises; ForbiddenName is one of them and comes first in an except chain."""
