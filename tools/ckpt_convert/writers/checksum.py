"""CRC-32 of files that are written out of order: of blocks, joined as if they had been read one after another.

CRC-32 (zlib's) guards against faults of disks, memory and copying, and misses one damaged file in four billion. It is
no protection against someone who wants to deceive, who could change the manifest as well; `--verify full` adds sha256."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

POLYNOMIAL = 0xEDB88320  # of CRC-32, bits reversed
ONE = 1 << 31
ZEROS = bytes(1 << 16)
FAR, NEAR = 91639, 91639 - 41678
"""x^91639 + x^41678 + 1 is a multiple of the polynomial, the first of three terms (Koopman, "32-Bit Cyclic Redundancy Codes
for Internet Applications", 2002: CRC-32 finds all errors of three bits up to that length). So is its 8th power, whose
coefficients are the same: a byte may be taken away if it is added, by XOR, to those NEAR and FAR bytes further on."""


def crc32(data: np.ndarray) -> int:
    """zlib.crc32 of bytes, which are destroyed. Folds them to the last FAR ones by additions of whole runs of bytes, which is
    five times as fast as zlib 1.2's table of single bytes."""
    folded = len(data) - FAR
    if folded < FAR:
        return zlib.crc32(data.data)
    data[:4] ^= 0xFF  # where CRC-32 begins; from here on it is linear
    for first in range(0, folded, NEAR):
        run = data[first : min(first + NEAR, folded)]
        data[first + NEAR : first + NEAR + len(run)] ^= run
        data[first + FAR : first + FAR + len(run)] ^= run
    return zlib.crc32(data[folded:].data, 0xFFFFFFFF)


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of a concatenation, from (CRC-32, bytes) of its parts in order.

    crc(a + b) = crc(a) * x^(8 * len(b)) + crc(b) modulo the polynomial: zlib's crc32_combine."""
    total = 0
    for checksum, length in parts:
        total = _multiply(_shift(length), total) ^ checksum
    return total


def crc32_of_zeros(length: int) -> int:
    """The CRC-32 of `length` zero bytes."""
    whole, rest = divmod(length, len(ZEROS))
    return combine([*[(zlib.crc32(ZEROS), len(ZEROS))] * whole, (zlib.crc32(ZEROS[:rest]), rest)])


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 * length) modulo the polynomial, by repeated squaring."""
    result, power = ONE, ONE >> 8
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


def _multiply(left: int, right: int) -> int:
    """The product of two polynomials over GF(2) modulo the polynomial; the highest bit is the constant term."""
    product = 0
    while left:
        if left & ONE:
            product ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return product
