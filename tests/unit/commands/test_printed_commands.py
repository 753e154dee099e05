"""Printed commands work as they are pasted into the shell that rlflow was called from."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow import errors
from rlflow.commands import cli
from rlflow.errors import CALLED_IN, as_called, command
from rlflow.report.lines import next_commands

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = "/usr/bin:/bin"
COMMAND = re.compile(
    r"(?:(?<=^  )|(?<=`))((?:\S*/)?(?:rlflow|python) .+?)(?:`|  #.*)?$", re.MULTILINE
)


@pytest.fixture
def called_by_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """The PATH of a shell without an active environment; what rlflow is called by there."""
    monkeypatch.setenv("PATH", NOWHERE)
    monkeypatch.delenv(CALLED_IN, raising=False)
    return command()


def pasted(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a shell without an active environment makes of the line; its input is at the end."""
    environment = {
        "PATH": NOWHERE,
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def parses(line: str) -> None:
    """Raises SystemExit for a line that argparse refuses."""
    words = shlex.split(line)
    assert words[0] == command() and os.access(words[0], os.X_OK)
    cli.parse(words[1:])


def test_a_command_is_called_as_this_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "rlflow", "pip"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(errors.sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CALLED_IN, raising=False)
    monkeypatch.setenv("PATH", NOWHERE)
    assert command() == ".venv/bin/rlflow"
    assert as_called("try `rlflow show RUN`") == "try `.venv/bin/rlflow show RUN`"
    assert as_called("not installed: pip install x") == "not installed: .venv/bin/pip install x"
    both = "pip install pytest && python -m pytest test.py"
    assert as_called(both) == ".venv/bin/pip install pytest && .venv/bin/python -m pytest test.py"
    assert (
        as_called("rlflow sets it; env/bin/pip install x")
        == "rlflow sets it; env/bin/pip install x"
    )
    monkeypatch.setenv(CALLED_IN, "/")  # a script went to the repository for the run
    assert command() == f"cd {tmp_path} && .venv/bin/rlflow"
    monkeypatch.delenv(CALLED_IN)
    monkeypatch.setenv("PATH", f"{scripts}:{NOWHERE}")
    assert command() == "rlflow"
    (scripts / "rlflow").unlink()
    assert command() == "python -m rlflow"


def test_every_command_is_known_to_what_spells_them(called_by_path: str) -> None:
    parser = cli.make_parser()
    names = next(action.choices for action in parser._actions if action.dest == "command")
    for name in names:
        assert as_called(f"(rlflow {name} X)") == f"({called_by_path} {name} X)"


def test_the_commands_at_the_end_of_a_run_are_parsed_as_pasted(called_by_path: str) -> None:
    written = {"run": "runs/my run", "export": "runs/my run/export"}
    asked = {"takes_questions": True, "example_question": "Who's there?"}
    printed = next_commands({"status": "interrupted by SIGINT", "written": written, **asked})
    assert [shlex.split(line)[1] for line, _ in printed] == ["train", "ask", "view", "show", "eval"]
    for line, _ in printed:
        parses(line)
    assert cli.parse(shlex.split(printed[1][0])[1:]).question == "Who's there?"


def test_help_and_errors_spell_commands_so_that_they_can_be_pasted(
    called_by_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    searching = [["search", name] for name in ("build", "serve", "query", "check", "qa")]
    for words in (
        ["train"],
        ["env", "new"],
        ["ask"],
        ["eval"],
        ["config"],
        ["convert"],
        *searching,
    ):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        told = capsys.readouterr().out
        assert f"usage: {called_by_path} {' '.join(words)}" in " ".join(told.split())
        assert not re.search(
            r"(?<![\w/])rlflow (?:train|env|eval|ask|show|search|config)\b", told
        ), told
        examples = told.partition("examples:")[2] or told.partition("example:")[2]
        for line in examples.replace("\\\n", " ").splitlines():
            for part in line.partition("  #")[0].split(" && "):
                if part.strip().startswith(called_by_path):
                    parses(part)
    assert cli.main(["search", "query", "x", "--corpus", "none.jsonl", "--index", "none"]) == 2
    assert cli.main(["config", "zzz"]) == 2
    assert f"`{called_by_path} config`" in capsys.readouterr().err


def test_a_misspelt_command_is_told_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, meant in (
        (["trian"], "train"),
        (["env", "chek"], "check"),
        (["search", "quary"], "query"),
    ):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert f"Did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.slow
def test_what_env_new_prints_runs_as_pasted(
    called_by_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["env", "new", "my_task"]) == 0
    lines = COMMAND.findall(capsys.readouterr().out)
    assert len(lines) == 3
    for line in lines:
        done = pasted(line, tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def test_what_env_policy_prints_trains_what_was_imitated(
    called_by_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rlflow_tools.kit.scaffold import LEARNING, write_environment

    from rlflow.commands.train import train_overrides
    from rlflow.config.schema import load_config

    made = write_environment("my_task", tmp_path, LEARNING)
    monkeypatch.chdir(tmp_path)
    words = [
        made.reference,
        made.player,
        "--out",
        "tiny",
        "--steps",
        "1",
        "--turns",
        "5",
        "environment.highest=4",
    ]
    assert cli.main(["env", "policy", *words]) == 0
    (line,) = COMMAND.findall(capsys.readouterr().out)
    parses(line)
    args = cli.parse(shlex.split(line)[1:])
    config = load_config(args.config, train_overrides(args), args.preset)
    assert config.environment == {"name": made.reference, "highest": 4}
    assert (config.model.path, config.rollout.max_turns, config.trainer.lr) == ("tiny", 5, 5e-4)
    assert cli.main([*shlex.split(line)[1:], "--dry-run"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_demo_prints_at_its_end_runs_as_pasted(tmp_path: Path) -> None:
    sizes = f"environment.world={{directory: {tmp_path}, size: 0.2, train_questions: 20, val_questions: 8}}"
    small = f"run.steps=1 rollout.prompts_per_step=2 rollout.samples_per_prompt=2 run.directory={tmp_path}/run '{sizes}'"
    train = f"{sys.executable} -m rlflow train --config {ROOT}/recipes/searchr1/config/short.yaml"
    model = f"model.path={ROOT}/recipes/searchr1/starting_policy"
    done = pasted(f"{train} {small} {model} metrics.picture=false", tmp_path)
    lines = COMMAND.findall(done.stderr.partition("next\n")[2])
    assert [shlex.split(line)[1] for line in lines] == ["ask", "view", "show", "eval"], (
        done.stdout + done.stderr
    )
    for line in lines:
        done = pasted(line.replace(" --open", ""), tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if " ask " in line:
            said = re.findall(r"\w+", done.stdout)
            assert not any(
                one == two == three for one, two, three in zip(said, said[1:], said[2:])
            ), done.stdout
