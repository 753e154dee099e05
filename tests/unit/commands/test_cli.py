"""The command line: what it hands on, its exit codes, and no traceback for what a user can fix."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from rlflow_tools.kit.checks.environments import check_environment
from rlflow_tools.kit.play import find_task, play, read_response
from rlflow_tools.kit.scaffold import LEARNING, write_environment

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
from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.errors import command as called
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json, write_text
from rlflow.texts import printable
from rlflow.types import Episode, Step, Task

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


# ---------------------------------------------------------------- env


def test_a_scaffolded_environment_is_short_keeps_the_contract_and_passes_its_own_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_environment("word_game", tmp_path)
    source, test, reference = made.source, made.test, made.reference
    assert len(source.read_text().splitlines()) <= 30
    assert [
        node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)
    ] == ["WordGame"]
    report = check_environment(ENVIRONMENT.build({"name": reference}), episodes=8)
    assert report.passed, str(report)
    monkeypatch.setattr(sys, "path", [*sys.path])  # its test puts its folder there
    tests = {
        name: each for name, each in runpy.run_path(str(test)).items() if name.startswith("test_")
    }
    del sys.modules["word_game"]
    assert len(tests) == 2
    for each in tests.values():
        each()


@pytest.mark.parametrize(
    "name", ["Word-Game", "class", "9lives", "a b", "random", "Random", "rlflow"]
)
def test_a_name_that_is_no_module_name_or_anothers_is_refused(name: str, tmp_path: Path) -> None:
    told = r"expected a snake_case name that no module has, such as '(?!random|rlflow)"
    with pytest.raises(ConfigError, match=told):
        write_environment(name, tmp_path)


def test_a_scaffold_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "test_guess.py").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_environment("guess", tmp_path)
    assert not (tmp_path / "guess.py").exists()


def test_env_check_prints_problems_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_environment("guess", tmp_path)
    source, reference = made.source, made.reference
    assert cli.main(["env", "check", reference, "environment.highest=5", "--episodes", "4"]) == 0
    assert "train: 64 tasks" in capsys.readouterr().out
    bad = tmp_path / "bad.py"
    bad.write_text(
        source.read_text()
        .replace("return Step(reward=1.0", "return (1.0")
        .replace(', terminated=True, metrics={"exact_match": 1.0})', ")")
    )
    assert cli.main(["env", "check", f"{bad}:Guess", "--episodes", "8"]) == 1
    assert "PROBLEM: step: expected an rlflow.Step, found float" in capsys.readouterr().out


def test_env_check_of_what_is_no_environment_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("class Mine: pass\ndef made(): return 3\n")
    for name, told in (
        ("Mine", "expected an rlflow.Environment, found a class"),
        ("made", "it returned int"),
    ):
        assert cli.main(["env", "check", f"{tmp_path / 'mine.py'}:{name}"]) == 2
        assert told in capsys.readouterr().err


def test_an_agent_in_the_place_of_an_environment_is_told_how_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text("def agent(task, client):\n    return 1.0\n")
    assert cli.main(["env", "check", f"{tmp_path}/my.py:agent"]) == 2
    assert f"environment.name=program environment.agent={tmp_path}/my.py:agent" in (
        capsys.readouterr().err
    )


def test_a_person_plays_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_environment("guess", tmp_path).reference
    environment = ENVIRONMENT.build({"name": reference})
    task = next(task for task in environment.tasks("train") if task.answer == 7)
    play(environment, task=task.id, source=io.StringIO("5\n8\nI say\n7\n"), color="never")
    out = capsys.readouterr().out
    told = [
        out.index(words)
        for words in ("higher", "lower", "A number, please.", "terminated after 4 turns, return 1")
    ]
    assert told == sorted(told)


def test_no_number_stands_twice_under_a_response(capsys: pytest.CaptureFixture[str]) -> None:
    """Environments of tools report their reward as a metric too."""

    class Pays(Environment):
        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "p")]

        def step(self, episode: Episode, response: str) -> Step:
            metrics = {"tool_calls": 1.0, "reward": 1.0}
            return Step("done", reward=1.0, terminated=True, metrics=metrics)

    play(Pays(), source=io.StringIO("x\n\n"), color="never")
    assert "reward 1  tool_calls 1\n" in capsys.readouterr().out


def test_the_scaffolds_validation_asks_what_its_training_never_did(tmp_path: Path) -> None:
    environment = ENVIRONMENT.build({"name": write_environment("guess", tmp_path).reference})
    prompts = {
        split: {task.prompt for task in environment.tasks(split)} for split in ("train", "val")
    }
    assert prompts["val"] and not prompts["train"] & prompts["val"]
    assert all(len(environment.tasks(split)) == 64 for split in prompts)


def test_a_scripted_player_plays_and_one_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_environment("guess", tmp_path, LEARNING)
    assert cli.main(["env", "play", made.reference, "--player", made.player, "--split", "val"]) == 0
    out = capsys.readouterr().out
    assert "The player is the policy." in out and "terminated after" in out and "return 1" in out
    assert out.count("> ") >= 1
    call = ["env", "play", made.reference, "--player"]
    (tmp_path / "bad.py").write_text("def raises(*_): return {}['x']\ndef number(*_): return 5\n")
    for player, told in (("raises", "KeyError: 'x' (" + str(tmp_path)), ("number", "found 5.")):
        assert cli.main([*call, f"{tmp_path}/bad.py:{player}"]) == 2
        assert told in capsys.readouterr().err
    assert cli.main([*call, made.player, "--turns", "0"]) == 2
    assert "--turns: expected at least 1, found 0." in capsys.readouterr().err


def test_a_line_break_that_ends_responses_reaches_the_environment_and_breaks_no_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Echo(Environment):
        stop = ("\n", "</end>")
        said: list[str] = []

        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "Say.\n")]

        def step(self, episode: Episode, response: str) -> Step:
            self.said.append(response)
            return Step("\n", terminated=len(self.said) == 3)

    play(Echo(), source=io.StringIO("five\n\nsix</end> more\n"), color="never")
    assert Echo.said == ["five\n", "\n", "six</end>"]
    header = capsys.readouterr().out.splitlines()[0]
    assert header == "task a. You are the policy: a response ends with Enter; Ctrl-D leaves."


def test_stop_strings_stand_in_the_header_so_that_they_can_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd(Environment):
        stop = ("</a>", " \t", "\n\n")

        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "Say.")]

        def step(self, episode: Episode, response: str) -> Step:
            return Step(response, terminated=True)

    play(Odd(), source=io.StringIO("one\ntwo\n\nthree"), color="never")
    header, *rest = capsys.readouterr().out.splitlines()
    assert r"ends with an empty line or </a> or ' \t' or '\n\n'; Ctrl-D" in header and rest[
        1:3
    ] == ["> one", "two"]


def test_leaving_and_the_turn_limit_end_a_game(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_environment("guess", tmp_path).reference
    environment = ENVIRONMENT.build({"name": reference})
    play(environment, source=io.StringIO(""), color="never")
    assert "left after 0 turns" in capsys.readouterr().out
    play(environment, max_turns=2, source=io.StringIO("0\n" * 9), color="never")
    assert "turn limit (2) reached" in capsys.readouterr().out


def test_a_response_ends_with_an_empty_line_or_a_stop_string() -> None:
    lines = io.StringIO("think\n<answer>x</answer> more\nnext\n\nlast")
    assert read_response(lines, ("</answer>",)) == "think\n<answer>x</answer>"
    assert read_response(lines, ("</answer>",)) == "next"
    assert read_response(lines, ()) == "last"
    assert read_response(lines, ()) is None


def test_tasks_are_found_by_id_before_position() -> None:
    tasks = [Task("1", "a"), Task("0", "b")]
    assert find_task(tasks, "0", "train").prompt == "b"
    with pytest.raises(ConfigError, match="a position below 2, found '5'"):
        find_task(tasks, "5", "train")
    with pytest.raises(ConfigError, match=r"tasks\('val'\) is empty"):
        find_task([], "0", "val")


# ---------------------------------------------------------------- show


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "run") as run:
        write_text(run.config, "run: {}\n")
        steps = [
            f'{{"step": {step}, "train/reward": {step / 10}, "time/step_s": 30}}\n'
            for step in range(1, 5)
        ]
        write_text(run.metrics, "".join(steps))
        write_json(
            run.summary, {"status": "finished", "steps": 4, "seconds": 130, "written": {"run": "x"}}
        )
        episodes = [
            {"task_id": f"t{n}", "attempt": 0, "prompt": "Who?", "answer": ["Ann"], "reward": float(n == 1), "stop": "terminated",
             "turns": [{"response": f"guess {n}", "observation": "<information>doc</information>"}],
             "metrics": {"exact_match": n == 1},
             "error": "", "prompt_tokens": 3, "response_tokens": 4, "observation_tokens": 5} for n in range(3)]  # fmt: skip
        import json

        for step in (2, 4):
            write_text(
                run.trajectories(step),
                "".join(
                    json.dumps({**one, "task_id": f"{one['task_id']}@{step}"}) + "\n"
                    for one in episodes
                ),
            )
    return tmp_path / "run"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_show_prints_summary_and_the_last_episodes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, str(run))
    for text in ("step 4 after 2:00", "reward 0.400", "finished after 4 steps and 2:10", "t0@4", "guess 1",
                 "<information>doc</information>", "reward 1", "expected Ann",
                 "tokens: 3 prompt, 4 sampled, 5 observed"):  # fmt: skip
        assert text in out
    assert "@2" not in out and "\033" not in out


def test_show_selects_step_and_outcome(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(run), "--step", "2", "--solved")
    assert "t1@2" in out and "t0@2" not in out and "1 of 1 solved episodes, 3 in all" in out
    out = shown(
        capsys, str(run / "trajectories" / "step_000004.jsonl"), "--failed", "--trajectories", "1"
    )
    assert "t0@4" in out and "t2@4" not in out and "step 4 after" not in out


def test_show_folds_attempts_that_are_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *_) = (run / "trajectories" / "step_000004.jsonl").read_text().splitlines()
    alike = [json.dumps({**json.loads(first), "attempt": attempt}) for attempt in range(4)]
    other = json.dumps({**json.loads(first), "attempt": 4, "reward": 1.0})
    (run / "trajectories" / "step_000004.jsonl").write_text("\n".join([*alike, other]) + "\n")
    out = shown(capsys, str(run), "--trajectories", "2")
    assert out.count("guess 0") == 2 and "attempts 1, 2, 3, 4, alike (x4)" in out
    assert "attempt 5 " in out and "5 of 5 episodes, 5 in all" in out


def test_show_colours_on_demand(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\033[36;1mguess 1\033[0m" in shown(capsys, str(run), "--color", "always")


def test_text_of_the_policy_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\tü\n\x07") == "a\ufffd[2J\tü\n\ufffd"


def test_show_says_which_steps_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(run), "--step", "3"]) == 2
    assert "no episodes of step 3; there are 2, 4." in capsys.readouterr().err
    assert cli.main(["show", str(run.parent)]) == 2
    assert "Runs in it: run" in capsys.readouterr().err


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
