"""The README's environment and the quick start's script run, also inside a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rlflow_tools.kit.scaffold import LEARNING, write_environment

from rlflow.commands import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + (ROOT / "docs" / "quick_start.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- test: (\S+) -->\n```python\n(.*?)```", PAGES, flags=re.S))
ENVIRONMENT, SCRIPT = "guess_number.py", "train_guess_number.py"

PLAYER, POLICY, CLASS = "guess_number_player.py:play", "guess_number_policy", "GuessNumber"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `rlflow env new guess_number --policy` writes; the policy has had two lessons only."""
    folder = tmp_path_factory.mktemp("readme")
    made = write_environment("guess_number", folder, LEARNING)
    (folder / SCRIPT).write_text(SNIPPETS[SCRIPT], encoding="utf-8")
    assert f'MODEL = "{POLICY}"' in SNIPPETS[SCRIPT] and made.policy.name == POLICY
    with contextlib.chdir(folder):
        assert (
            cli.main(
                ["env", "policy", f"{ENVIRONMENT}:{CLASS}", PLAYER, "--out", POLICY, "--steps", "2"]
            )
            == 0
        )
    return folder


def run(folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [ENVIRONMENT, SCRIPT])
def test_snippet_is_at_most_30_lines(name: str) -> None:
    assert len(SNIPPETS[name].splitlines()) <= 30


def test_the_environment_is_what_the_command_writes(workplace: Path) -> None:
    assert (workplace / ENVIRONMENT).read_text() == SNIPPETS[ENVIRONMENT]


def test_environment_keeps_the_contract(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    assert cli.main(["env", "check", f"{ENVIRONMENT}:{CLASS}"]) == 0


def test_training_script_runs_in_a_running_event_loop_two_steps_of_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = SNIPPETS[SCRIPT].replace("range(30)", "range(2)")
    assert short != SNIPPETS[SCRIPT]
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)

    async def cell() -> None:
        exec(compile(short, SCRIPT, "exec"), {"__name__": "__main__"})

    asyncio.run(cell())
    del sys.modules["guess_number"]
    assert len(rewards(capsys.readouterr().out)) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_and_the_script_as_printed_teach_the_game(tmp_path: Path) -> None:
    """The whole of it: the tiny policy is made, and the printed rewards rise from at most 0.3 to at least 0.8."""
    run(tmp_path, "-m", "rlflow", "env", "new", "guess_number", "--policy")
    (tmp_path / SCRIPT).write_text(SNIPPETS[SCRIPT], encoding="utf-8")
    seen = rewards(run(tmp_path, SCRIPT))
    assert len(seen) == 30 and seen[0] <= 0.3 and sum(seen[-5:]) / 5 >= 0.8, seen


def rewards(output: str) -> list[float]:
    steps = re.findall(r"step (\d+): reward ([\d.]+), gradient norm ([\d.]+)", output)
    assert [int(step) for step, _, _ in steps] == list(range(len(steps))), output
    return [float(reward) for _, reward, _ in steps]


def test_both_commands_stand_at_the_top() -> None:
    top = README.split("## ")[0]
    assert "bash recipes/searchr1/run_train.sh" in top
    assert "bash tests/run.sh" in top
