"""Dtypes by their names in torch, safetensors and torch.save, and casts between them: a conversion does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DType:
    """name: in torch; itemsize: bytes of an element; safetensors: in a safetensors header; storage: the class in a file of
    torch.save."""

    name: str
    itemsize: int
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
"""Of weights that are kept with a scale for each block of 128 x 128."""
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
    """Rows of bytes of one dtype of WEIGHTS as rows of bytes of another, rounded as torch does: by way of float32 (c10/util,
    BFloat16.h and Half.h), to the nearest, halves to even."""
    return from_float32(to_float32(data, dtype), to)


def to_float32(data: np.ndarray, dtype: DType) -> np.ndarray:
    """Rows of bytes of FLOAT8 or a dtype of WEIGHTS as rows of float32."""
    data = np.ascontiguousarray(data)
    if dtype is FLOAT8:
        return _FLOAT8_VALUES[data]
    if dtype is BFLOAT16:
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):  # Inf and NaN are refused where they would be written
        return data.view(dtype.name).astype(np.float32)


def _float8_values() -> np.ndarray:
    """Of each byte: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinity, and one NaN per sign (Micikevicius
    et al., arXiv 2209.05433, table 1)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    values = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa + 0.0, -9))
    values = np.where(code & 127 == 127, np.nan, values)
    return np.where(code < 128, values, -values).astype(np.float32)


_FLOAT8_VALUES = _float8_values()


def from_float32(values: np.ndarray, to: DType) -> np.ndarray:
    """Rows of float32 as rows of bytes of a dtype of WEIGHTS."""
    if to is not BFLOAT16:
        with np.errstate(all="ignore"):
            return values.astype(to.name).view(np.uint8)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).view(np.uint8)
