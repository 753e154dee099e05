"""Tensors to transfer, and the comparison of every bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Pairs = list[tuple[str, Tensor]]


def made(version: int, size: int = 3000) -> Pairs:
    """Tensors of every kind: odd sizes, no elements, no dimensions, not contiguous, NaN and minus zero among the values."""
    generator = torch.Generator().manual_seed(version)
    values = torch.randn(size, 7, generator=generator)
    special = torch.tensor([float("nan"), -0.0, 0.0, float("-inf")])
    return [
        ("wide", values.to(torch.bfloat16)),
        ("turned", values.t()),
        ("special", torch.cat([special, values[0]]).to(torch.float16)),
        ("scalar", torch.tensor(float(version))),
        ("empty", torch.empty(0, 5)),
        ("flags", values[:, 0] > 0),
        ("eight", values[:5].to(torch.float8_e4m3fn)),
        ("whole", torch.arange(size)),
    ]


def trained(version: int, share: float = 0.01, size: int = 100_000, dtype: torch.dtype = torch.bfloat16) -> Pairs:
    """Two tensors; from one version to the next this share of their values changes."""
    weights = torch.arange(2 * size, dtype=torch.float32).to(dtype)
    for step in range(1, version + 1):
        places = torch.randperm(2 * size, generator=torch.Generator().manual_seed(step))[: int(2 * size * share)]
        weights[places] = torch.full_like(weights[places], float(step)) / 3
    return [("first", weights[:size].view(-1, 10)), ("second", weights[size:])]


def assert_same(found: Iterable[tuple[str, Tensor]], expected: Pairs) -> None:
    pairs = list(found)
    assert [name for name, _ in pairs] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(pairs, expected):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        first, second = (one.contiguous().reshape(-1).view(torch.uint8) for one in (ours, theirs))
        assert torch.equal(first, second), name
