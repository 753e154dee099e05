"""Claims about what an index costs: sizes of the field's index by arithmetic."""

from __future__ import annotations

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.indices.cost import building_bytes, parse_kind, stored_bytes

WIKI, DIMENSIONS = 21_015_324, 768


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    # 21,015,324 x 768: 64.56 GB in float32, a half and a quarter of it; IVF adds 8 bytes per id and
    # its centroids; HNSW32 adds 64 + 8 links of 4 bytes.
    [
        ("Flat", 64.56),
        ("torch", 64.56),
        ("SQfp16", 32.28),
        ("SQ8", 16.14),
        ("IVF4096,SQ8", 16.14 + 0.168 + 0.013),
        ("HNSW32", 70.6),
    ],
)
def test_sizes_of_wikipedia_2018(kind: str, gigabytes: float) -> None:
    found = stored_bytes(parse_kind(kind, DIMENSIONS), WIKI, DIMENSIONS)
    assert found / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize("kind", ["Flat", "torch"])
def test_streamed_kinds_are_built_in_memory_that_does_not_depend_on_the_corpus(kind: str) -> None:
    parsed = parse_kind(kind, DIMENSIONS)
    few, many = (building_bytes(parsed, count, DIMENSIONS, block=2048) for count in (WIKI, 10**9))
    assert few == many < 1e9


def test_a_kind_whose_cost_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="cost of 'LSH' is not known"):
        parse_kind("LSH", 8)
