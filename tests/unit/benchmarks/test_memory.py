"""The memory benchmark runs, on lengths as of agent episodes."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

from common import SHAPES, write_random_model
from memory import measure, skewed_lengths


def test_lengths_are_skewed_and_within_their_bounds() -> None:
    lengths = sorted(skewed_lengths(random.Random(0), rows=1000, longest=256))
    assert lengths[0] >= 4 and lengths[-1] == 256
    assert 35 <= lengths[500] <= 50 and lengths[900] > 3 * lengths[500]


@pytest.mark.slow
def test_a_step_of_engine_and_trainer_is_measured(tmp_path: Path) -> None:
    write_random_model(tmp_path, SHAPES["tiny"])
    taken = asyncio.run(
        measure(tmp_path, "tiny", 2, ("trainer", "engine"), packed=True, longest=24)
    )
    assert len(taken) == 2 and min(taken) > 50
