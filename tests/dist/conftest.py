"""Ranks that the tests of layouts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.megatron_ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()
