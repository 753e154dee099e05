"""Arrays of many sequences, laid end to end under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

Arrays = Mapping[str, np.ndarray]
Lengths = dict[str, list[int | None]]
"""Of each array, its length in one sequence after another; None where a sequence has none."""


def join(sequences: Sequence[Arrays]) -> tuple[dict[str, np.ndarray], Lengths]:
    """The arrays of each name, one behind the other along the first axis, and their lengths."""
    arrays, lengths = {}, {}
    for name in dict.fromkeys(chain.from_iterable(sequences)):
        parts = [sequence.get(name) for sequence in sequences]
        arrays[name] = np.concatenate([part for part in parts if part is not None])
        lengths[name] = [None if part is None else len(part) for part in parts]
    return arrays, lengths


def split(arrays: Arrays, lengths: Lengths) -> list[dict[str, np.ndarray]]:
    """The sequences that were joined, as views. Raises KeyError or ValueError where the lengths
    are not those of the arrays."""
    sequences: list[dict[str, np.ndarray]] = [{} for _ in next(iter(lengths.values()), [])]
    for name, own in lengths.items():
        ends = np.cumsum([length or 0 for length in own])
        if ends[-1] != len(arrays[name]):
            raise ValueError(f"{name}: expected {ends[-1]} values, found {len(arrays[name])}")
        parts = np.split(arrays[name], ends[:-1])
        for sequence, length, part in zip(sequences, own, parts, strict=True):
            if length is not None:
                sequence[name] = part
    return sequences
