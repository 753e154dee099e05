"""What the runs of these tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.letters import write_letters_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The letters task's model, which no test changes."""
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")
