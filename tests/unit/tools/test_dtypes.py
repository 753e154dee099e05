"""Casts between dtypes are those of torch, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from rlflow_tools.ckpt_convert.dtypes import FLOAT8, WEIGHTS, DType, cast, to_float32


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype, to", itertools.permutations(WEIGHTS, 2), ids=str)
def test_cast_rounds_as_torch(dtype: DType, to: DType) -> None:
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (64, 512 * dtype.itemsize), generator=draw, dtype=torch.uint8)
    values = patterns.view(getattr(torch, dtype.name))
    edges = torch.tensor([0.0, -0.0, 65504, 65519.9, 65520, 1e-8, -6e-5, 3.4e38, 1.00390625, 1.01171875]).to(values.dtype)
    values[0, : len(edges)] = edges
    expected = values.to(getattr(torch, to.name))
    found = torch.from_numpy(cast(bits(values), dtype, to).copy()).view(expected.dtype)
    assert torch.equal(found.isnan(), expected.isnan()), "a NaN is lost"
    assert np.array_equal(bits(found[~found.isnan()]), bits(expected[~expected.isnan()]))


def test_every_byte_of_float8_has_torchs_value() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(to_float32(codes, FLOAT8), expected)
