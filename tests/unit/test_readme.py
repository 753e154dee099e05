"""The README's environment and training script run as they are printed, plain and inside a running event loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import tiny_model

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- test: (\S+) -->\n```python\n(.*?)```", README, flags=re.S))
ENVIRONMENT, SCRIPT = "guess_number.py", "train_guess_number.py"

NOTEBOOK = """
import asyncio, sys

async def cell(source):
    exec(compile(source, sys.argv[1], "exec"), {"__name__": "__main__"})

asyncio.run(cell(open(sys.argv[1]).read()))
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the snippets and a model at the path that the README names: the shipped one, else a random one."""
    folder = tmp_path_factory.mktemp("readme")
    for name, source in SNIPPETS.items():
        (folder / name).write_text(source, encoding="utf-8")
    named = re.search(r'MODEL = "(.*?)"', SNIPPETS[SCRIPT])
    assert named, "the training script names its MODEL"
    model, shipped = folder / named[1], ROOT / named[1]
    model.parent.mkdir(parents=True)
    if shipped.is_dir():
        model.symlink_to(shipped)
    else:
        tiny_model(model)
    return folder


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [ENVIRONMENT, SCRIPT])
def test_snippet_is_at_most_30_lines(name: str) -> None:
    assert len(SNIPPETS[name].splitlines()) <= 30


def test_environment_keeps_the_contract(workplace: Path) -> None:
    run(workplace, "-m", "rlflow", "env", "check", f"{ENVIRONMENT}:GuessNumber")


def test_training_script_runs_as_printed(workplace: Path) -> None:
    assert_trains(run(workplace, SCRIPT))


def test_training_script_runs_in_a_running_event_loop(workplace: Path) -> None:
    assert_trains(run(workplace, "-c", "import sys; sys.path.insert(0, '')\n" + NOTEBOOK, SCRIPT))


def assert_trains(output: str) -> None:
    steps = re.findall(r"step (\d): reward ([\d.]+), gradient norm ([\d.]+)", output)
    assert [int(step) for step, _, _ in steps] == [0, 1, 2, 3], output


def test_both_commands_stand_at_the_top() -> None:
    top = README.split("## ")[0]
    assert "bash recipes/searchr1/run_train.sh" in top
    assert "bash tests/run.sh" in top
