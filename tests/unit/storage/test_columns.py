"""Arrays of many sequences go into one per name and come back."""

from __future__ import annotations

import numpy as np
import pytest

from rlflow.storage.columns import join, split


def test_sequences_come_back_whatever_they_have() -> None:
    """Of any type and width, of several lengths, empty, or left out."""
    routes = np.arange(24, dtype=np.uint16).reshape(3, 4, 2)  # tokens, layers, top-k
    sequences = [
        {"tokens": np.array([1, 2, 3]), "routes": routes},
        {"tokens": np.zeros(0, np.int64), "sampled": np.array([True])},
        {"tokens": np.array([4]), "routes": routes[:1]},
    ]
    arrays, lengths = join(sequences)
    assert lengths["routes"] == [3, None, 1] and arrays["routes"].shape == (4, 4, 2)
    for found, expected in zip(split(arrays, lengths), sequences, strict=True):
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.dtype == expected[name].dtype and np.array_equal(array, expected[name])
    assert join([]) == ({}, {}) and split({}, {}) == []


@pytest.mark.parametrize("lengths", [[2], [4], [None]])
def test_lengths_of_other_arrays_are_refused(lengths: list[int | None]) -> None:
    with pytest.raises(ValueError, match="tokens: expected"):
        split({"tokens": np.arange(3)}, {"tokens": lengths})
    with pytest.raises(KeyError):
        split({}, {"tokens": lengths})
