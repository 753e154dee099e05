"""The notebook's cells run one after the other, inside a running event loop as in Jupyter."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SIZES = "LESSONS, STEPS, PROMPTS = 300, 30, 16"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """Runs cells as Jupyter does; returns what they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")

    async def kernel(cells: list[str]) -> None:
        names = {"__name__": "__main__"}
        for number, cell in enumerate(cells):
            exec(compile(cell, f"cell {number}", "exec"), names)

    def run(cells: list[str]) -> str:
        asyncio.run(kernel(cells))
        return capsys.readouterr().out

    return run


def test_it_is_a_notebook_without_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4 and len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(
        NOTEBOOK["cells"]
    )
    assert not [
        cell for cell in NOTEBOOK["cells"] if cell.get("outputs") or cell.get("execution_count")
    ]


def test_the_cells_run_in_order_with_tiny_settings(run: Callable[[list[str]], str]) -> None:
    assert SIZES in CELLS[0]
    tiny = CELLS[0].replace(SIZES, "LESSONS, STEPS, PROMPTS = 2, 2, 2")
    printed = run([tiny, *CELLS[1:]])
    assert (
        "the contract holds" in printed
        and len(re.findall(r"^step \d: reward ", printed, flags=re.M)) == 2
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_as_it_is_teaches_the_game(run: Callable[[list[str]], str]) -> None:
    rewards = [
        float(reward)
        for reward in re.findall(r"^step \d+: reward ([\d.]+)", run(CELLS), flags=re.M)
    ]
    assert len(rewards) == 30 and rewards[0] <= 0.3 and sum(rewards[-5:]) / 5 >= 0.8, rewards
