"""Pickles that name torch's classes and functions, written without importing torch, which would take a second.

A pickler looks up each name that it writes. Here the names are written first, into the places of the reader's memo where
the pickler then believes them to be (`pickle.Pickler.memo`). They stay on the reader's stack, below the value."""

from __future__ import annotations

import io
import pickle
from typing import Any

from ..dtypes import WEIGHTS


class Function:
    """Stands in for a function, or for a class that is called as one."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *arguments: Any) -> Any:
        """A pickler asks whether it can be called; only the pickle's reader does so."""
        raise NotImplementedError(self.name)


class FunctionCall:
    """What is read as the result of a function's call."""

    def __init__(self, function: Function, *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments


class Object:
    """What is read as an object of another class, with these attributes, or with a state that its class understands."""

    module: str
    name: str

    def __init__(self, state: Any = None, **attributes: Any) -> None:
        self._state = attributes if state is None else state

    def __getstate__(self) -> Any:
        return self._state


def object_of(module: str, name: str) -> type[Object]:
    """Stands in for a class: its objects are read as objects of the class with this name."""
    return type(name, (Object,), {"module": module, "name": name})


SIZE = Function("torch", "Size")
REBUILD_TENSOR = Function("torch._utils", "_rebuild_tensor_v2")
STORAGES = {dtype: Function("torch", dtype.storage) for dtype in WEIGHTS}
OF_ARCHIVES = (REBUILD_TENSOR, *STORAGES.values())
"""What pickles in archives of torch.save name."""


def size(numbers: tuple[int, ...]) -> FunctionCall:
    """A torch.Size."""
    return FunctionCall(SIZE, numbers)


def prepare(pickler: pickle.Pickler, file: io.BytesIO, *names: Any) -> None:
    """Writes names and those of the weights' dtypes into `file`, to which a pickler of protocol 2 then writes."""
    named = [(name, name.module, name.name) for name in names] + [(dtype, "torch", dtype.name) for dtype in WEIGHTS]
    file.write(b"\x80\x02")
    for number, (_, module, name) in enumerate(named):
        file.write(f"c{module}\n{name}\n".encode() + b"q" + bytes([number]))
    pickler.memo = {id(standin): (number, standin) for number, (standin, *_) in enumerate(named)}  # type: ignore


def dumps(value: Any, *names: Any) -> bytes:
    """The pickle of a value that may hold these stand-ins, `FunctionCall`s of them, and dtypes of weights."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=2)
    prepare(pickler, file, *names)
    pickler.dump(value)
    return file.getvalue()
