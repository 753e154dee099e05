"""Batches on their way to the ranks: put once, read where they lie."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.cluster.trainer import RayTrainer
from rlflow.cluster.wire import Parcels, pack, receive, unpack
from rlflow.errors import RLFlowError
from rlflow.types import Batch


class Store:
    """Ray's object store, as far as batches use it: what is put there is only read."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def put(self, packed: tuple[np.ndarray, str]) -> int:
        array = packed[0].copy()
        array.flags.writeable = False
        self.held.append((array, packed[1]))
        return len(self.held) - 1

    def get(self, references: list[int]) -> list[Any]:
        return [self.held[reference] for reference in references]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=store.put, get=store.get))
    return store


def batch_of(rows: int) -> Batch:
    shape = (rows, 4)
    return Batch(
        torch.arange(rows * 4).reshape(shape), torch.ones(shape, dtype=torch.bool), torch.randn(shape), torch.randn(shape),
        torch.rand(shape), torch.full((rows,), 4), torch.ones(rows), extras={"ids": torch.zeros(rows, 4, 2).bfloat16()},
    )  # fmt: skip


def test_what_arrives_is_what_was_sent_and_lies_where_it_was_put(store: Store) -> None:
    sent = batch_of(3)
    found = receive(Parcels().send(sent))
    for name, value in vars(sent).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, name), value), name
    assert (
        torch.equal(found.extras["ids"], sent.extras["ids"])
        and found.values is None
        and found.metrics == {}
    )
    places = {array.ctypes.data for array, _ in store.held}
    assert found.tokens.data_ptr() in places and found.extras["ids"].data_ptr() in places
    assert found.select([1]).tokens.data_ptr() not in places  # a rank's own rows are its own


def test_a_tensor_is_put_once_as_long_as_it_is_the_same(store: Store) -> None:
    parcels, sent = Parcels(), batch_of(3)
    first = parcels.send(sent)
    count = len(store.held)
    again = parcels.send(sent.replace(advantages=torch.zeros(3, 4)))
    assert len(store.held) == count + 1 and again[0]["tokens"] == first[0]["tokens"]
    sent.logprobs[0, 0] = 7.0  # changed where it lies
    assert receive(parcels.send(sent)).logprobs[0, 0] == 7.0
    assert len(store.held) == count + 2


def test_bfloat16_travels_by_its_bits() -> None:
    value = torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16)
    found = unpack(pack(value))
    assert found.dtype is torch.bfloat16 and torch.equal(
        found.view(torch.int16), value.view(torch.int16)
    )


def test_a_closed_trainer_asks_nothing_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose functions start it, where it does not run."""
    monkeypatch.setitem(sys.modules, "ray", None)
    trainer = object.__new__(RayTrainer)
    trainer._actors = []
    with pytest.raises(RLFlowError, match="the trainer is closed"):
        trainer._gather([])
