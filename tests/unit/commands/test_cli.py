"""The command line: what it hands on, its exit codes, and no traceback for what a user can fix."""

from __future__ import annotations

import argparse
import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from rlflow_tools.kit.scaffold import write_environment

from rlflow.commands import cli
from rlflow.commands.arguments import option_overrides
from rlflow.commands.doctor import (
    JOBS,
    TESTED,
    all_jobs,
    diagnose,
    job_row,
    package_row,
    verdict,
    versions_tested,
)
from rlflow.commands.train import train_overrides
from rlflow.errors import ConfigError
from rlflow.errors import command as called
from rlflow.texts import printable

ROOT = Path(__file__).resolve().parents[3]


def train_arguments(*arguments: str) -> argparse.Namespace:
    return cli.parse(["train", *arguments])


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        [],
        ["train"],
        ["eval"],
        ["env"],
        ["env", "new"],
        ["env", "check"],
        ["env", "play"],
        ["show"],
        ["doctor"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.parse([*command, "--help"])
        assert ended.value.code == 0
        assert len(capsys.readouterr().out) > 200 or command == ["doctor"]


def test_commands_stand_in_one_order_whoever_brings_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    listed = re.findall(r"^    (\w+)", capsys.readouterr().out, flags=re.M)
    working = ["train", "sft", "eval", "env", "algorithm", "merge"]
    looking = ["show", "view", "compare", "ask", "config", "doctor"]
    assert listed == [*working, *looking, *sorted(listed[12:])]


def test_short_options_become_keys_and_explicit_keys_come_last(tmp_path: Path) -> None:
    data = tmp_path / "it's data.jsonl"
    data.write_text("")
    args = train_arguments(
        "--model", str(tmp_path), "--train-data", str(data), "--resume", "model.path=other"
    )
    overrides = train_overrides(args)
    from rlflow.config.schema import load_config

    config = load_config(None, overrides)
    assert (
        config.environment["train"] == str(data)
        and config.run.resume
        and config.model.path == "other"
    )


def test_options_and_overrides_mix_in_any_order() -> None:
    args = train_arguments("run.steps=1", "--resume", "run.seed=2", "--dry-run", "run.name=x")
    assert args.overrides == ["run.steps=1", "run.seed=2", "run.name=x"] and args.dry_run
    for mistake in (["--resum"], ["--no-such=3"], ["--no-such", "3"]):
        with pytest.raises(SystemExit):
            train_arguments("--dry-run", *mistake)


def test_an_unknown_option_names_the_help_that_has_it_and_the_closest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, told in (
        (["env", "play", "x.py:X", "--set", "a=1"], f"--set; see {called()} env play --help."),
        (["train", "--resmue"], f"--resmue; see {called()} train --help. Did you mean '--resume'?"),
    ):
        with pytest.raises(SystemExit):
            cli.parse(words)
        assert capsys.readouterr().err.rstrip().endswith(told)


def test_missing_files_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    told = "rlflow: ConfigError: --model: /no/such/model: no such file or directory."
    assert cli.main(["train", "--model", "/no/such/model", "--dry-run"]) == 2
    assert capsys.readouterr().err == f"{told}\n"
    assert (
        cli.main(["train", "--model", "/no/such/model", "--corpus", "/nor/this", "--dry-run"]) == 2
    )
    assert capsys.readouterr().err == f"{told} --corpus: /nor/this: no such file or directory.\n"


@pytest.mark.parametrize(
    "arguments", [["show", "x" * 5000], ["search", "query", "a", "--corpus", "x" * 5000]]
)
def test_what_the_system_refuses_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlflow: OSError: ") and "too long" in said and said.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DEBUG", "1")
    with pytest.raises(ConfigError):
        cli.main(["train", "run.stps=1"])


def test_one_ctrl_c_at_the_prompt_is_130_without_a_traceback(tmp_path: Path) -> None:
    source = write_environment("guess", tmp_path).source
    terminal, side = pty.openpty()  # input stays open: nothing but the signal can end it
    process = subprocess.Popen([sys.executable, "-m", "rlflow", "env", "play", f"{source}:Guess"], cwd=ROOT,
                               stdin=side, stdout=side, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        said = ""
        while "> " not in said:
            said += os.read(terminal, 4096).decode()
        time.sleep(
            0.3
        )  # as a person would: a signal between the prompt and the read behind it waits for the next key
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(terminal)
        os.close(side)
    assert process.returncode == 130 and err == "rlflow: interrupted.\n"


PLUG_IN = """
from rlflow.commands.doctor import Job
from rlflow.commands.arguments import Option

def add(commands):
    parser = commands.add_parser('hello')
    parser.set_defaults(run=lambda args: 7)

OPTIONS = [Option("--board-file", "environment.board", "the board"), Option("--speed", "environment.speed", "steps per second",
                                                                          "N", must_exist=False, commands=["eval"])]
JOBS = [Job("play chess", ("no-such-chess",), "pip install chess", tested={"no-such-chess": "1.2"})]
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plug_in.py").write_text(PLUG_IN)
    information = tmp_path / "plug_in-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: plug-in\nVersion: 1\n")
    points = {
        "commands": "hello = a_plug_in:add",
        "options": "chess = a_plug_in:OPTIONS",
        "jobs": "chess = a_plug_in:JOBS",
    }
    text = "".join(f"[rlflow.{group}]\n{line}\n" for group, line in points.items())
    (information / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_plug_in", raising=False)


def test_plug_ins_add_commands(plug_in: None) -> None:
    assert cli.main(["hello"]) == 7


def test_plug_ins_add_options_which_the_help_shows_in_their_group(
    plug_in: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "it's a board"
    board.write_text("")
    args = train_arguments("--board-file", str(board), "environment.board=mine")
    assert train_overrides(args) == [
        f"environment.board='{str(board).replace(chr(39), chr(39) * 2)}'",
        "environment.board=mine",
    ]
    with pytest.raises(SystemExit):
        train_arguments("--speed", "3")  # of eval only
    assert option_overrides(cli.parse(["eval", "--model", "m", "--speed", "3"]), "eval") == [
        "environment.speed='3'"
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.parse(["train", "--help"])
    assert "chess options:\n  --board-file FILE" in capsys.readouterr().out
    assert cli.main(["train", "--board-file", "/no/such/board", "--dry-run"]) == 2
    assert "ConfigError: --board-file: /no/such/board: no such file" in capsys.readouterr().err


def test_plug_ins_add_jobs_to_the_doctor(plug_in: None) -> None:
    job = all_jobs()[-1] if all_jobs()[-1].name == "play chess" else all_jobs()[len(JOBS)]
    assert job_row(job, {}, gpu=False) == ("play chess", "no", "no-such-chess", "pip install chess")
    assert versions_tested()["no-such-chess"] == "1.2"


def test_without_an_environment_the_installed_ones_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "--dry-run"]) == 2
    error = capsys.readouterr().err
    told = "environment.name: expected an environment, found none; set environment.name or give --env NAME. Installed: "
    assert error.count(told) == 1 and "search" in error


def test_text_of_the_policy_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\tü\n\x07") == "a\ufffd[2J\tü\n\ufffd"


# ---------------------------------------------------------------- doctor


def test_doctor_ends_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code = diagnose()
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("verdict: ") and code == (
        1 if "not possible" in out else 0
    )
    assert all(job.name in out for job in all_jobs()) and metadata.version("torch") in out


def test_doctor_names_what_is_missing_and_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing: dict[str, str | None] = dict.fromkeys(TESTED)
    job = JOBS[0].__class__(
        "job", ("no-such-package-a|no-such-package-b", "torch"), "pip install x"
    )
    assert job_row(job, {**nothing, "torch": "1"}, gpu=False) == (
        "job",
        "no",
        "no-such-package-a or no-such-package-b",
        "pip install x",
    )
    gpu = JOBS[0].__class__("job", ("torch",), "pip install x", gpu=True)
    assert job_row(gpu, {"torch": "1"}, gpu=False) == ("job", "no", "an NVIDIA GPU", "")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _: None)
    lacking = "a C compiler (gcc), Python.h (python3-dev)"
    assert job_row(gpu, {"torch": "1"}, gpu=True) == ("job", "no", lacking, "")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert job_row(gpu, {"torch": "1"}, gpu=True) == ("job", "yes", "", "")


def test_doctor_has_a_row_for_every_extra_that_an_environment_needs() -> None:
    jobs = {job.name: job for job in all_jobs()}
    named = " ".join(jobs).lower()
    for what in ("agents", "sandbox", "browser", "nethack", "mathematics", "vllm"):
        assert what in named, what
    assert all(job.install for job in jobs.values())


def test_doctor_asks_for_programs_of_the_system_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sandbox that is missing, one that the kernel forbids, and one that works."""
    job = next(job for job in all_jobs() if "sandbox" in job.name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_row(job, {}, gpu=False)[1:] == ("no", "bubblewrap", job.install)
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    _, ready, missing, install = job_row(job, {}, gpu=False)
    assert ready == "no" and "No permissions" in missing and install
    bwrap.write_text("#!/bin/sh\nexit 0\n")
    assert job_row(job, {}, gpu=False)[1:] == ("yes", "", "")


def test_doctor_says_which_versions_were_not_tested() -> None:
    assert [
        package_row("megatron-core", version)[-1] for version in ("0.16.1", "0.17.1", "0.19.2")
    ] == ["", "differs", ""]
    assert (
        package_row("torch", TESTED["torch"] + "+cpu")[-1] == ""
        and package_row("torch", "2.0")[-1] == "differs"
    )
    assert verdict(dict(TESTED), gpu=False) == ("verdict: ready to train on CPU.", True)


def test_doctor_knows_the_versions_of_the_constraints_file() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    constraints = dict(
        line.split("==") for line in lines if "==" in line and not line.startswith("#")
    )
    tested = versions_tested()
    assert {name: constraints.get(name) for name in tested} == {
        name: said.split(" or ")[0] for name, said in tested.items()
    }


def test_a_run_that_began_with_overwrite_can_be_resumed_from_its_own_configuration(
    tmp_path: Path,
) -> None:
    from rlflow.config.schema import load_config

    (tmp_path / "config.yaml").write_text("run: {overwrite: true}\n")
    config = load_config(
        str(tmp_path / "config.yaml"), train_overrides(train_arguments("--resume"))
    )
    assert config.run.resume and not config.run.overwrite
    both = load_config(None, train_overrides(train_arguments("--resume", "--overwrite")))
    assert both.run.resume and both.run.overwrite, "a contradiction is refused later, not resolved"
