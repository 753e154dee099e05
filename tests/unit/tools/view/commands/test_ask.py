"""`rlflow ask`: a question to a policy, in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlflow_tools.view.commands.ask import final_model

from rlflow.commands import cli
from rlflow.rollout import Rollout
from rlflow.storage.files import write_json
from rlflow.types import Task
from tests.flow.letters import REFERENCE, Letters, write_letters_model

ASKED = f"{Path(__file__).resolve()}:Asked"


class Asked(Letters):
    """The letters' game with any prompt."""

    def task_from_text(self, text: str) -> Task:
        return Task("asked", text, ("a", "b"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("other"), seed=1)


def answers_of(model: Path, question: str) -> list[str]:
    with Rollout.from_pretrained(
        model, Asked(), max_turns=2, max_response_tokens=2, max_total_tokens=16
    ) as rollout:
        (group,) = rollout.collect(
            [Asked().task_from_text(question)], samples_per_prompt=1, temperature=0.0
        )
    return [turn.response for turn in group.trajectories[0].turns]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    limits = ["rollout.max_turns=2", "rollout.max_response_tokens=2", "rollout.max_total_tokens=16"]
    assert cli.main(["ask", *words, "--env", ASKED, *limits]) == 0
    return capsys.readouterr().out


def test_what_is_printed_is_what_a_rollout_gets(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for question in ("a?", "fc?"):
        lines = ask(capsys, str(model), question).splitlines()
        said = [
            line for line in lines if not line.startswith("  │ ") and not line.startswith("cut")
        ]
        assert said == answers_of(model, question)
        assert ("  │ |b?" in lines) == (len(said) == 2)


def test_another_policy_stands_beside_it(
    model: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ask(capsys, str(model), "a?", "--start", str(other))
    left, right = zip(*(line.split(" │ ") for line in out.splitlines()))
    assert (left[0].strip(), right[0].strip()) == ("before", "after")
    for column, path in ((left, other), (right, model)):
        said = [text.strip() for text in column]
        assert all(answer.strip() in said for answer in answers_of(path, "a?"))


def test_questions_come_from_the_input_without_one(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", iter(["a?\n", "\n", "b?\n"]))
    out = ask(capsys, str(model))
    assert out.count("? ") == 4 and all(
        answer in out for question in ("a?", "b?") for answer in answers_of(model, question)
    )


def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["--env", REFERENCE], "Letters: it makes no task of a text"),
        (
            ["--env", ASKED, "--before"],
            "no run that says where it started; name it with --start DIR",
        ),
        (["--env", ASKED, "--start", str(tmp_path)], "found no config.json"),
        (["--env", ASKED, "--temperature", "-1"], "--temperature: expected at least 0"),
    ):
        assert cli.main(["ask", str(model), "a?", *words]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1


def test_a_finished_run_answers_by_its_export_and_one_that_goes_on_by_its_checkpoint(
    tmp_path: Path,
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    assert final_model(str(tmp_path)) == tmp_path / "export"
    for step in (20, 40):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        write_json(folder / "state.json", {"step": step})
    write_json(tmp_path / "summary.json", {"steps": 20})
    assert final_model(str(tmp_path)) == tmp_path
    write_json(tmp_path / "summary.json", {"steps": 40})
    assert final_model(str(tmp_path)) == tmp_path / "export"
    assert final_model("a/model") == Path("a/model")
