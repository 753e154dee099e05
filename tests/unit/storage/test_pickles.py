"""Pickles of checkpoints: every object is read as a stand-in, and nothing in them runs."""

from __future__ import annotations

import argparse
import datetime
import enum
import functools
import io
import pickle
import struct
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner

from rlflow.storage.pickles import (
    ENUMS,
    MOST_NAMES,
    ForbiddenName,
    GuardUnpickler,
    Inert,
    InertUnpickler,
    origin_of,
    read_metadata,
)

MEMBER = {
    2: b"\x80\x02c__builtin__\ngetattr\nq\x00ctorch.distributed.checkpoint.metadata\n"
    b"_MEM_FORMAT_ENCODING\nq\x01X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMATq\x02\x86q\x03Rq\x04.",
    4: b"\x80\x04\x95w\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x07getattr\x94\x93\x94"
    b"\x8c%torch.distributed.checkpoint.metadata\x94\x8c\x14_MEM_FORMAT_ENCODING\x94\x93\x94\x8c"
    b"\x17TORCH_CONTIGUOUS_FORMAT\x94\x86\x94R\x94.",
}
"""By protocol, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT as Python 3.11.2 of Debian 12 pickles it."""


class Colour(enum.Enum):
    RED = 1


class NamedColour(enum.Enum):
    """Pickled as Python 3.11.2 pickles every enum."""

    RED = 1

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return getattr, (self.__class__, self._name_)


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.value = 5

    def method(self) -> None: ...


class WithKeywords:
    def __new__(cls, *, size: int) -> WithKeywords:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"size": 3}


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


KINDS = {
    "set": {1, 2},
    "frozenset": frozenset((1, 2)),
    "defaultdict": defaultdict(list, {"a": [1]}),
    "enum": Colour.RED,
    "enum by name": NamedColour.RED,
    "partial": functools.partial(sorted, reverse=True),
    "class of an optimizer": torch.optim.AdamW,
    "function": torch.nn.functional.silu,
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "nested class": Outer.Inner(),
    "method": Outer().method,
    "type alias": dict[str, int],
    "keywords": WithKeywords(size=3),
    "namespace": argparse.Namespace(path=Path("/a/b"), deep=argparse.Namespace(size=1)),
    "range": range(3),
    "exception": ValueError("text"),
    "complex": 1j,
    "bytes": bytearray(b"abc"),
}


def read(content: bytes, reader: type[InertUnpickler] = InertUnpickler) -> Any:
    return reader(io.BytesIO(content)).load()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_beside_the_weights_are_passed_over(kind: str, protocol: int) -> None:
    value = read(pickle.dumps({"before": 1, "object": KINDS[kind], "after": [2, 3]}, protocol))
    assert value["before"] == 1 and value["after"] == [2, 3]


def test_names_that_were_passed_over_are_listed() -> None:
    value = [torch.optim.AdamW, argparse.Namespace(a=1), torch.float32, datetime.timedelta(1), {1}]
    unpickler = InertUnpickler(io.BytesIO(pickle.dumps(value, 2)))
    unpickler.load()
    assert unpickler.passed_over == {"torch.optim.adamw.AdamW", "datetime.timedelta"}


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_genuine_member_of_python_3_11_2_is_read(protocol: int) -> None:
    for reader in (InertUnpickler, GuardUnpickler):
        member = read(MEMBER[protocol], reader)
        assert isinstance(member, Inert) and member.arguments == ("TORCH_CONTIGUOUS_FORMAT",)
        assert origin_of(member).endswith("_MEM_FORMAT_ENCODING")


def test_the_known_enums_are_torchs() -> None:
    for name, members in ENUMS.items():
        module = torch_metadata if "metadata" in name else planner
        assert members == set(getattr(module, name.rpartition(".")[2]).__members__)


def hostile(witness: Path) -> dict[str, bytes]:
    """Pickles that make a file when an ordinary reader loads them, and one that reaches for code."""
    code = f"open({str(witness)!r}, 'w')"
    text = b"X" + struct.pack("<I", len(code)) + code.encode()
    touch = Calls(Path.touch, witness)
    attacks: dict[str, bytes] = {
        f"call, protocol {protocol}": pickle.dumps(touch, protocol)
        for protocol in (0, 1, 2, 3, 4, 5)
    }
    attacks["eval"] = b"\x80\x02c__builtin__\neval\n" + text + b"\x85R."
    attacks["instance"] = b"(" + text + b"i__builtin__\neval\n."
    attacks["object"] = b"(c__builtin__\neval\n" + text + b"o."
    attacks["chain of attributes"] = pickle.dumps(
        Calls(
            getattr,
            Calls(getattr, Calls(getattr, torch_metadata.Metadata, "__init__"), "__globals__"),
            "get",
        )
    )
    attacks["partial"] = pickle.dumps(Calls(functools.partial(eval, code)))
    attacks["map"] = pickle.dumps([Calls(list, Calls(map, eval, [code]))])
    return attacks


@pytest.mark.parametrize("name", hostile(Path()))
def test_nothing_in_a_hostile_pickle_runs(name: str, tmp_path: Path) -> None:
    content = hostile(tmp_path / "witness")[name]
    if name != "chain of attributes":
        pickle.loads(content)
        (tmp_path / "witness").unlink()  # the attack is one
    read(content)
    with pytest.raises(ForbiddenName):
        read(content, GuardUnpickler)
    assert not list(tmp_path.iterdir())


GETATTR = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93"
METADATA = b"\x8c\x25torch.distributed.checkpoint.metadata"
FORMATS = METADATA + b"\x8c\x14_MEM_FORMAT_ENCODING\x93"
PAST_THE_GUARD = {
    "attribute of a class": GETATTR + METADATA + b"\x8c\x08Metadata\x93\x8c\x08__init__\x86R.",
    "attribute of an enum": GETATTR + FORMATS + b"\x8c\x09__class__\x86R.",
    "attribute of a member": GETATTR + MEMBER[4][11:-1] + b"\x8c\x05value\x86R.",
    "default": GETATTR + FORMATS + b"\x8c\x17TORCH_CONTIGUOUS_FORMATN\x87R.",
    "no arguments": GETATTR + b")R.",
    "new object": GETATTR + FORMATS + b"\x8c\x09__class__\x86\x81.",
    "state of a member": MEMBER[4][:-1] + b"}\x8c\x07_value_K\x01sb.",
    "dotted name": b"\x80\x04\x8c\x1ctorch.distributed.checkpoint\x8c\x11metadata.Metadata\x93.",
}


@pytest.mark.parametrize("name", PAST_THE_GUARD)
def test_the_guard_lets_getattr_reach_members_of_known_enums_alone(name: str) -> None:
    """torch's own reader calls the real `getattr` after it."""
    with pytest.raises(ForbiddenName):
        read(PAST_THE_GUARD[name], GuardUnpickler)


@pytest.mark.parametrize("reader", [InertUnpickler, GuardUnpickler])
def test_no_pickle_changes_the_class_of_stand_ins(reader: type[InertUnpickler]) -> None:
    name = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for state in (b"}X\x06\x00\x00\x00originK\x01s", b"N}X\x06\x00\x00\x00originK\x01s\x86"):
        with pytest.raises(TypeError):
            read(name + state + b"b.", reader)


def test_names_and_memory_are_bounded() -> None:
    many = b"".join(b"cmodule\nname%d\n0" % number for number in range(MOST_NAMES + 1))
    for content in (b"\x80\x02" + many + b"N.", b"\x80\x02cmodule\n" + b"n" * 1000 + b"\n."):
        with pytest.raises(ForbiddenName, match="names more than"):
            read(content)
    pairs = pickle.dumps([(str(number), number) for number in range(1000)])[:-1]
    copies = b"ccollections\nOrderedDict\nh\xff\x85R" * 1000
    tracemalloc.start()
    value = read(pairs + b"q\xff0]" + b"(" + copies + b"e.")
    assert len(value) == 1000 and tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_names_are_printable() -> None:
    unpickler = InertUnpickler(io.BytesIO(b"\x80\x02cbad\x1b[31m\nname\n."))
    unpickler.load()
    assert unpickler.passed_over == {"bad\ufffd[31m.name"}


def test_a_module_s_state_keeps_its_order() -> None:
    value = read(pickle.dumps(OrderedDict(b=1, a=2), 2))
    assert list(value.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("reader", [InertUnpickler, GuardUnpickler])
def test_another_object_in_the_place_of_a_tensors_description_is_named(
    reader: type[InertUnpickler],
) -> None:
    tables = torch_metadata.Metadata(
        {"weight": torch_metadata.MetadataIndex("weight")}, storage_data={}
    )
    with pytest.raises(ValueError, match=r"found .*MetadataIndex"):
        read_metadata(io.BytesIO(pickle.dumps(tables)), reader)
