"""Ranks that the tests of layouts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.megatron_ranks import Ranks

RANKS = Ranks()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Launched by the first test with work for them."""
    return RANKS


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the ranks with the last test of this folder: threads that gloo left in them wake up a
    hundred times a second, beside all tests that follow."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        RANKS.close()
