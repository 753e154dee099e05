"""Every form of `rlflow env new`: what it writes works as it is, and learns."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlflow_tools.kit.play import play
from rlflow_tools.kit.scaffold import forms, write_environment

from rlflow.commands import cli
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, MissingPackageError
from rlflow.report.sinks import read_metrics
from rlflow.run.assemble import make_environment
from tests.reference import ORACLE

ROOT = Path(__file__).resolve().parents[4]
NAME = "first_try"
KINDS = {"agent": "program", "dataset": "dataset"}
"""Of the forms without a class: the environment that their configuration names."""
FEW = ("--steps", "2", "--episodes", "6", "--turns", "2")
"""Lessons that teach nothing, in no time."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # tests of projects put their folder there
    yield tmp_path
    for name in [one for one in sys.modules if one.startswith(NAME)]:
        del sys.modules[name]


def needed(form: str) -> None:
    """Skips what a form's packages are missing for."""
    try:
        forms()[form].requires()
    except MissingPackageError as missing:
        pytest.skip(str(missing))


def records(split: str) -> list[dict[str, object]]:
    lines = Path(f"{NAME}_{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_forms_exclude_each_other_and_the_help_says_what_each_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(forms()) == ["policy", "agent", "dataset", "script"]
    with pytest.raises(SystemExit):
        cli.main(["env", "new", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "[--policy | --agent | --dataset | --script]" in told
    assert all(form.help in told for form in forms().values())
    with pytest.raises(SystemExit):
        cli.main(["env", "new", NAME, "--agent", "--dataset"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["policy", "agent", "dataset", "script"])
def test_a_project_parses_passes_its_own_test_and_is_never_written_over(
    form: str, folder: Path
) -> None:
    needed(form)
    made = write_environment(NAME, Path(), forms()[form])
    for path in made.files:
        text = path.read_text()
        assert not re.search(r"\{(module|Class|folder|source|policy|configuration)\}", text), path
        if path.suffix == ".py":
            ast.parse(text)
    tests = {
        name: each
        for name, each in runpy.run_path(str(made.test.resolve())).items()
        if name.startswith("test_")
    }
    assert len(tests) == 2
    for each in tests.values():
        each()
    with pytest.raises(ConfigError, match="is there already"):
        write_environment(NAME, Path(), forms()[form])


@pytest.mark.parametrize("form", KINDS)
def test_no_task_for_validation_is_trained_on(form: str, folder: Path) -> None:
    needed(form)
    write_environment(NAME, Path(), forms()[form])
    train, val = ({str(row["prompt"]) for row in records(split)} for split in ("train", "val"))
    assert train.isdisjoint(val)
    assert len(train) == len(records("train")) >= 48 and len(val) >= 16


@pytest.mark.parametrize("directory", [Path(), Path("below here")])
@pytest.mark.parametrize("form", KINDS)
def test_the_configuration_finds_its_files_from_where_it_was_written(
    form: str, directory: Path, folder: Path
) -> None:
    needed(form)
    made = write_environment(NAME, directory, forms()[form])
    config = load_config(str(made.configuration))
    environment = make_environment(config.environment)
    assert environment.tasks("train") and config.model.path == str(made.policy)
    environment.shutdown()
    hint = re.search(r"own add\n((?:#   .*\n)+)", made.configuration.read_text())
    assert hint is not None
    own = cli.parse(
        ["train", "--config", str(made.configuration), *hint[1].replace("#", "").split()]
    )
    real = load_config(own.config, own.overrides)
    assert real.trainer.lr == 1e-6 and real.rollout.max_response_tokens == 512
    printed = made.following()
    words = [shlex.split(line, comments=True) for line in printed]
    assert ["rlflow", "train", "--config", str(made.configuration)] in words
    for line in words:
        if line[0] == "rlflow":
            cli.parse(line[1:])


@pytest.mark.parametrize("form", KINDS)
def test_a_tiny_policy_is_made_from_the_files_and_trained_a_step(
    form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed(form)
    made = write_environment(NAME, Path(), forms()[form])
    yaml = str(made.configuration)
    assert cli.main(["env", "check", KINDS[form], "--config", yaml, "--episodes", "2"]) == 0
    policy = ["env", "policy", KINDS[form], made.player, "--config", yaml]
    assert cli.main([*policy, "--out", str(made.policy), *FEW]) == 0
    small = (
        "run.steps=1 rollout.prompts_per_step=2 rollout.samples_per_prompt=2 evaluation.questions=2"
    )
    quick = f"evaluation.final_questions=2 trainer.backend={ORACLE} metrics.picture=false metrics.page=false"
    assert cli.main(["train", "--config", yaml, *small.split(), *quick.split()]) == 0
    (before, after) = read_metrics(f"runs/{NAME}/metrics.jsonl")
    assert "eval/score" in before and "train/loss" in after
    assert "runs/first_try/export" in capsys.readouterr().err


def test_a_person_plays_the_policy_of_an_agent_by_the_stop_strings_that_it_asks_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed("agent")
    made = write_environment(NAME, Path(), forms()["agent"])
    environment = make_environment(load_config(str(made.configuration)).environment)
    answer = environment.tasks("train")[0].answer
    play(environment, source=io.StringIO(f"hm\n{answer}\n"), color="never")
    environment.shutdown()
    told = capsys.readouterr().out
    assert "a response ends with Enter" in told and "a number, please" in told
    assert "terminated after 2 turns, return 1" in told


def test_a_project_whose_packages_are_missing_is_not_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert cli.main(["env", "new", NAME, "--agent"]) != 0
    told = capsys.readouterr().err
    assert "'openai' is not installed" in told and "[agents]" in told
    assert list(folder.iterdir()) == []


def shell(line: str, folder: Path) -> str:
    """What a person's shell makes of a line, with this interpreter's commands in its PATH."""
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": commands, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", ["policy", "agent", "dataset", "script"])
def test_the_printed_commands_teach_nearly_all_from_next_to_nothing(
    form: str, tmp_path: Path
) -> None:
    needed(form)
    printed = shell(f"rlflow env new {NAME} --{form}", tmp_path)
    lines = re.findall(r"^  (.+)$", printed, flags=re.M)
    assert len(lines) == 5
    for line in lines:
        shell(line.replace(" --open", ""), tmp_path)
    run = tmp_path / "runs" / NAME
    score = "eval/exact_match" if form in ("policy", "script") else "eval/score"
    curve = [one[score] for one in read_metrics(run / "metrics.jsonl") if score in one]
    assert curve[0] <= 0.2 and curve[-1] >= 0.9, curve
    assert (run / "progress.png").is_file() and (run / "view.html").is_file()
    assert (run / "export" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_script_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL at five times of a run of twelve steps, which saves after every second."""
    shell(f"rlflow env new {NAME} --script", tmp_path)
    script = tmp_path / f"train_{NAME}.py"
    text = script.read_text().replace("STEPS = 30", "STEPS = 12")
    script.write_text(text.replace("run.step % 10", "run.step % 2"))
    shell(f"python {script.name} && mv runs/{NAME} runs/whole", tmp_path)
    metrics = tmp_path / "runs" / NAME / "metrics.jsonl"
    for least in (1, 3, 4, 7, 10):
        started = subprocess.Popen([sys.executable, script.name], cwd=tmp_path)
        while started.poll() is None and not (
            metrics.is_file() and metrics.read_text().count("train/loss") >= least
        ):
            time.sleep(0.02)
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
    shell(f"python {script.name}", tmp_path)
    one, other = (
        [
            {name: value for name, value in record.items() if not name.startswith("time")}
            for record in read_metrics(tmp_path / "runs" / run / "metrics.jsonl")
        ]
        for run in ("whole", NAME)
    )
    assert one == other
    exports = [tmp_path / "runs" / run / "export/model.safetensors" for run in ("whole", NAME)]
    assert exports[0].read_bytes() == exports[1].read_bytes()
