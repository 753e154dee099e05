"""Reads the pickles of a checkpoint without running anything in them: stand-ins take the place of
all objects.

Two readers share the stand-ins. `InertUnpickler` takes every name, because it calls none.
`GuardUnpickler` takes a short list of names alone: what it lets pass, torch's own unguarded reader
may read after it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from rlflow.texts import one_line

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
ENUMS: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": frozenset(
        ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
    ),
    "torch.distributed.checkpoint.planner.WriteItemType": frozenset(("TENSOR", "SHARD", "BYTE_IO")),
}
"""The enums of `.metadata` and their members. Python 3.11.2, which Debian 12 has, pickles a member as a
call of `getattr` (enum.py, Enum.__reduce_ex__), later versions by its value."""
METADATA_NAMES = frozenset(
    (
        # Megatron's subclass of Metadata
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
        # And of SavePlan, in older versions
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "torch.Size",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        # Megatron keeps the plans of all ranks there, to reuse them in its next save
        # (dist_checkpointing/strategies/state_dict_saver.py, `all_local_plans`).
        "torch.distributed.checkpoint.planner.BytesIOWriteData",
        "torch.distributed.checkpoint.planner.SavePlan",
        "torch.distributed.checkpoint.planner.TensorWriteData",
        "torch.distributed.checkpoint.planner.WriteItem",
        "torch.serialization._get_layout",
        *ENUMS,
        *(f"torch.{name}" for name in DTYPES),
    )
)
"""All that torch's own writer and Megatron's put into `.metadata`."""
FAMILIAR_NAMES = METADATA_NAMES | frozenset(
    (
        "_codecs.encode",
        "_io.BytesIO",
        "argparse.Namespace",
        "collections.defaultdict",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "numpy.ndarray",
        "signal.Signals",
        "torch.Tensor",
        "torch.device",
        # A tensor with attributes, such as an optimizer's main parameters
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_tensor_v2",
        "torch.nn.parameter.Parameter",
        "types.SimpleNamespace",
        "typing.Any",
    )
)
FAMILIAR_PACKAGES = ("builtins", "megatron", "omegaconf", "transformer_engine")
"""With FAMILIAR_NAMES, what checkpoints hold as a matter of course: not worth a word to the user.
Read like every other name: nothing is imported and nothing is called."""
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of Python 2 that pickles of protocol 2 have, as torch.save writes them."""
MOST_NAMES = 4096
"""Names in one pickle; checkpoints have about fifty, and each costs a class of a kilobyte."""
LONGEST_NAME = 500


class ForbiddenName(pickle.UnpicklingError):
    """The pickle names something that could do more than hold data, or too much."""


class Inert:
    """An object of a pickle that was not built: what it was called with, and its state. Items of
    what was a collection are not kept. Each name in a pickle has a subclass."""

    __slots__ = ("arguments", "state")
    origin: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Not called for every kind of pickled object; `__new__` is."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Inert:
        """What a partial function or a method would return."""
        return Inert(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        # On a class it lacks `self`, so that no pickle can change a stand-in's class.
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class Member(Inert):
    """A member of an enum in ENUMS."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise ForbiddenName(f"changes a member of {self.origin}; not loaded")


class Items(dict):
    """An OrderedDict of a pickle, such as a module's state, without the attributes that it had."""

    def __init__(self, *arguments: Any) -> None:
        """Python 3 sets items one by one; copies of arguments would let a small file fill the
        memory."""

    def __setstate__(self, state: Any) -> None:
        """Attributes are not kept."""


@dataclass(frozen=True)
class Storage:
    """A persistent id of torch.save: class (such as FloatStorage), file name within the archive,
    elements."""

    kind: str
    key: str
    elements: int


def origin_of(value: Any) -> str:
    """`module.name` of what a stand-in, or a class of stand-ins, stands for; empty for anything
    else."""
    is_class = isinstance(value, type) and issubclass(value, Inert)
    return value.origin if is_class or isinstance(value, Inert) else ""


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle with `Inert` in place of every object but Python's own containers and numbers.

    passed_over: the names that a checkpoint does not have as a matter of course."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._classes: dict[str, type[Inert]] = {}
        self.passed_over: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        module = OLD_MODULES.get(module, module)
        origin = f"{module}.{name}"
        if origin == "collections.OrderedDict":
            return Items
        stand_in = self._stand_in(origin)
        storage = module in ("torch", "torch.storage") and name.endswith("Storage")
        familiar = origin in FAMILIAR_NAMES or module.split(".")[0] in FAMILIAR_PACKAGES
        if not storage and not familiar:
            self.passed_over.add(stand_in.origin)
        return stand_in

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", kind, str() as key, _, int() as elements) if origin_of(kind):
                return Storage(_last_name(kind), key, elements)
        # Its text is not shown: that of tuples within tuples can be longer than all memory.
        raise pickle.UnpicklingError("unknown persistent id")

    def _stand_in(self, origin: str) -> type[Inert]:
        """The class of stand-ins for a name. Raises ForbiddenName for too many or too long ones."""
        if origin not in self._classes:
            if len(self._classes) >= MOST_NAMES or len(origin) > LONGEST_NAME:
                raise ForbiddenName(
                    f"names more than {MOST_NAMES} objects, or one with more than {LONGEST_NAME} "
                    "characters; not loaded"
                )
            self._classes[origin] = self._new_class(origin)
        return self._classes[origin]

    def _new_class(self, origin: str) -> type[Inert]:
        base: type[Inert] = Member if origin in ENUMS else Inert
        content: dict[str, Any] = {"__slots__": (), "origin": one_line(origin)}
        if origin == "builtins.getattr":
            content["__new__"] = lambda cls, *arguments: self._attribute(*arguments)
        return type("Inert", (base,), content)

    def _attribute(self, *arguments: Any) -> Any:
        """What stands for `getattr(...)`: a member of a known enum, or a class, such as one that is
        defined within another or whose method is called."""
        match arguments:
            case (owner, str() as name, *_):
                if name in ENUMS.get(origin_of(owner), ()):
                    return owner(name)
                return self._stand_in(f"{origin_of(owner) or type(owner).__name__}.{name}")
        raise pickle.UnpicklingError("getattr with other arguments than an object and a name")


class GuardUnpickler(InertUnpickler):
    """Reads a `.metadata` and refuses whatever could do more than describe tensors, so that torch's
    own reader may read it afterwards.

    The classes themselves are not imported: torch.distributed would cost a second and 50 MiB."""

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{OLD_MODULES.get(module, module)}.{name}"
        if "." in name or (origin not in METADATA_NAMES and origin != "builtins.getattr"):
            name = one_line(origin, 100)
            raise ForbiddenName(f".metadata names {name}, which has no place there; not loaded")
        return self._stand_in(origin)

    def _attribute(self, *arguments: Any) -> Any:
        # torch's reader will call the real getattr, with which code could be reached.
        match arguments:
            case (type() as owner, str() as name) if name in ENUMS.get(origin_of(owner), ()):
                return owner(name)
        raise ForbiddenName(
            ".metadata calls builtins.getattr for more than a member of an enum; not loaded"
        )


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
    (file, first byte, bytes) of everything that is stored; passed_over: names of objects that no
    writer of ours puts there."""

    tensors: dict[str, tuple[tuple[int, ...], str, tuple[Chunk, ...]]]
    objects: dict[str, tuple[str, int, int]]
    extents: tuple[tuple[str, int, int], ...]
    passed_over: frozenset[str] = frozenset()


def read_metadata(file: IO[bytes], reader: type[InertUnpickler] = GuardUnpickler) -> Table:
    """The tables of a `.metadata`. reader: GuardUnpickler where torch reads the file afterwards.

    Raises ForbiddenName, or another error of DAMAGE for a damaged file: a chunk or an object
    without a place in a file, something in a file that is not described, something else than the
    description of a tensor in its place, and whatever unpickling raises."""
    unpickler = reader(file)
    tables = _state(unpickler.load(), "Metadata")
    places = {}
    for index, info in tables["storage_data"].items():
        at = _state(index, "MetadataIndex").get("offset")  # of objects: its default, not pickled
        place = _state(info, "_StorageInfo")
        name = index.state["fqn"]
        if not isinstance(name, str):
            raise ValueError("the name of a tensor is no text")
        places[name, None if at is None else _numbers(at)] = (
            _path(place["relative_path"]),
            int(place["offset"]),
            int(place["length"]),
        )
    extents = tuple(places.values())
    tensors, objects = {}, {}
    for name, entry in tables["state_dict_metadata"].items():
        if _last_name(entry) == "BytesStorageMetadata":
            objects[name] = places.pop((name, None))
            continue
        described = _state(entry, "TensorStorageMetadata")
        chunks = []
        for chunk in described["chunks"]:
            box = _state(chunk, "ChunkStorageMetadata")
            offsets = _numbers(box["offsets"])
            chunks.append(Chunk(offsets, _numbers(box["sizes"]), *places.pop((name, offsets))))
        dtype = origin_of(described["properties"].state[0]).removeprefix("torch.")
        tensors[name] = (_numbers(described["size"]), dtype, tuple(chunks))
    if places:
        raise ValueError(f"'{min(places, key=str)[0]}' is stored but not described")
    return Table(tensors, objects, extents, frozenset(unpickler.passed_over))


def _last_name(value: Any) -> str:
    return origin_of(value).rpartition(".")[2]


def _state(value: Any, expected: str) -> Mapping[str, Any]:
    """The fields of an object whose class, or that of its parent in `.metadata`, has this name."""
    name = _last_name(value)
    if not name.endswith(expected) or not isinstance(value.state, dict):
        present = origin_of(value)[:200] or type(value).__name__
        raise ValueError(f"expected {expected}, found {present}")
    return value.state


def _numbers(size: Inert) -> tuple[int, ...]:
    """The content of a torch.Size."""
    return tuple(map(int, size.arguments[0])) if size.arguments else ()


def _path(value: Any) -> str:
    """A text, or what a path of pathlib is made of."""
    return "/".join(value.arguments if isinstance(value, Inert) else (value,))


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
