"""The scripts in the order of RLinf's documentation, end to end on a small corpus."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.flow.seed_order import follow


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_seeds_scripts_run_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    seconds = follow(tmp_path)
    assert {
        "download",
        "build_index",
        "launch_server",
        "run_train",
        "convert",
        "run_eval",
    } <= seconds.keys()
