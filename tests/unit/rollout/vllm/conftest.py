"""Real vLLM servers, each started once for all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rollout.vllm.real import Started


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("untied"), tied=False)
    yield started
    started.close()


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("tied"), tied=True)
    yield started
    started.close()
