"""Dtypes by their names in torch, safetensors and torch.save; imports torch where one is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DType:
    """name: in torch. safetensors: in a header. storage: the class in a file of torch.save."""

    name: str
    itemsize: int  # bytes
    safetensors: str
    storage: str

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name

    def __str__(self) -> str:
        return self.name


FLOAT32 = DType("float32", 4, "F32", "FloatStorage")
BFLOAT16 = DType("bfloat16", 2, "BF16", "BFloat16Storage")
FLOAT16 = DType("float16", 2, "F16", "HalfStorage")
FLOAT64 = DType("float64", 8, "F64", "DoubleStorage")
WEIGHTS = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
"""What weights are kept as."""
FLOAT8 = DType("float8_e4m3fn", 1, "F8_E4M3", "Float8_e4m3fnStorage")
"""Of weights with a scale for each block of 128 x 128."""
OTHERS = (
    DType("int64", 8, "I64", "LongStorage"),
    DType("int32", 4, "I32", "IntStorage"),
    DType("int16", 2, "I16", "ShortStorage"),
    DType("int8", 1, "I8", "CharStorage"),
    DType("uint8", 1, "U8", "ByteStorage"),
    DType("bool", 1, "BOOL", "BoolStorage"),
)
NAMED = {dtype.name: dtype for dtype in (*WEIGHTS, *OTHERS)}
OPTIONS = {"keep": None, "bf16": BFLOAT16, "fp16": FLOAT16, "fp32": FLOAT32}
"""By the words of `--dtype`."""


def cast(data: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    """Rows of bytes of one dtype as rows of bytes of another, rounded by torch."""
    import torch

    values = torch.from_numpy(np.ascontiguousarray(data)).view(getattr(torch, dtype.name))
    return values.to(getattr(torch, to.name)).view(torch.uint8).numpy()


def as_tensor(data: np.ndarray, dtype: DType, shape: Sequence[int]) -> Tensor:
    """Bytes as a tensor, which shares their memory."""
    import torch

    return torch.from_numpy(data.reshape(-1)).view(getattr(torch, dtype.name)).view(tuple(shape))
