"""Evaluation: means, intervals over questions, and which configuration an evaluation runs with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.commands.cli import main, parse
from rlflow.commands.eval import evaluation_config, new_directory
from rlflow.config.checks import check_secrets
from rlflow.config.loading import save_config, to_dict
from rlflow.config.schema import EvaluationSection, RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.report.metrics import Metric
from rlflow.report.reductions import interval95
from rlflow.rollout import Rollout
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.run import evaluate as evaluation
from rlflow.run.assemble import make_engine, make_environment
from rlflow.run.evaluate import EvaluationSchedule, evaluate, means_over_sets, metrics_by_set
from rlflow.run.origin import ModelDirectory, model_directory
from rlflow.types import Group, StopReason, Task, Trajectory
from tests.flow.letters import REFERENCE, Letters, write_letters_model

REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}


def evaluation_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    return evaluation.evaluation_metrics(trajectories, REGISTERED)


def attempt(question: str, reward: float, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    return Trajectory(question, f"-1:{question}", [], [], reward, stop, {"exact_match": reward})


def test_one_attempt_per_question_has_wilsons_interval() -> None:
    metrics = evaluation_metrics([attempt(f"q{index}", float(index < 3)) for index in range(10)])
    assert metrics["eval/exact_match"] == pytest.approx(0.3)
    assert (metrics["eval/exact_match_low"], metrics["eval/exact_match_high"]) == interval95(
        [1.0] * 3 + [0.0] * 7
    )


@pytest.mark.parametrize("every", [0, 1, 3, 5, 20])
@pytest.mark.parametrize("at_start", [True, False])
def test_the_tasks_that_are_still_asked_are_those_of_a_run_played_out(
    every: int, at_start: bool
) -> None:
    steps, tasks = 10, [Task(str(index), "?") for index in range(7)]
    section = EvaluationSection(
        every_steps=every, at_start=at_start, questions=3, final_questions=5
    )
    schedule = EvaluationSchedule(tasks, section)
    asked: list[int] = []
    expected: list[tuple[int, int]] = []  # (asked before, what was said of the rest)
    for step in range(steps + 1):
        expected.append((len(asked), schedule.tasks_after(step, steps)))
        if step < steps and schedule.due(step):
            asked += [step] * 3
            schedule.record(step, {})
            expected.append((len(asked), schedule.tasks_after(step, steps)))
    asked += [steps] * 5
    assert [len(asked) - before for before, _ in expected] == [rest for _, rest in expected]


def test_tasks_that_all_score_alike_leave_an_interval_of_some_width() -> None:
    """An agent's score is a reward, not a share: two tasks of 0 say little of a third."""
    for unit, high in (("share", 0.6576), ("reward", 0.6576)):
        registered = {"score": Metric(unit, "of an episode", score=True)}
        two = [Trajectory(name, name, [], [], 0.0, StopReason.TERMINATED, {"score": 0.0}) for name in "ab"]  # fmt: skip
        metrics = evaluation.evaluation_metrics(two, registered)
        assert metrics["eval/score_low"] == 0
        assert metrics["eval/score_high"] == pytest.approx(high, abs=1e-4)


def test_named_rewards_are_means_in_which_0_stands_for_none() -> None:
    attempts = [attempt("q0", 1.0), attempt("q1", 0.0), attempt("q2", 1.0, StopReason.ABORTED)]
    attempts[0].rewards = {"style": 0.5}
    attempts[2].rewards = {"style": 9.0}
    assert evaluation_metrics(attempts)["eval/reward/style"] == 0.25


def test_asking_the_same_questions_again_narrows_no_interval() -> None:
    """A policy that is right about the same 3 of 10 questions, four times each, was still asked 10 questions."""
    once = [attempt(f"q{index}", float(index < 3)) for index in range(10)]
    counts = {"eval/attempts": 40.0, "eval/asked": 40.0}
    assert evaluation_metrics(once * 4) == {**evaluation_metrics(once), **counts}


def test_attempts_are_averaged_within_their_question_by_hand() -> None:
    metrics = evaluation_metrics(
        [attempt("a", 1.0), attempt("a", 0.0), attempt("b", 1.0), attempt("b", 1.0)]
    )
    assert metrics["eval/exact_match"] == 0.75
    half = 1.959964 * 0.125**0.5 / 2**0.5  # the questions' means are 0.5 and 1: variance 1/8
    assert metrics["eval/exact_match_low"] == pytest.approx(0.75 - half)
    assert 0.75 + half > 1 == metrics["eval/exact_match_high"]  # a share cannot be more


def test_attempts_at_the_same_tasks_are_spread_by_hand() -> None:
    def group(name: str, *rewards: float) -> Group:
        return Group(name, Task(name, "?"), [attempt(name, reward) for reward in rewards])

    groups = [
        group("a", 1.0, 0.0),
        group("b", 0.0, 0.0),
        group("c", 1.0, 1.0),
        group("d", 0.2, 0.0),
    ]
    groups.append(Group("e", Task("e", "?"), [attempt("e", 1.0, StopReason.ABORTED)]))
    found = evaluation.spread(groups, REGISTERED)
    assert (found.pass_1, found.pass_all, found.differing) == (0.375, 0.5, 0.5)
    assert evaluation.spread(groups, {}).pass_1 == 0.5  # without a score a positive reward counts


def test_sets_are_scored_apart_and_their_mean_does_not_weigh_them_by_size() -> None:
    def group(of_set: str, index: int, reward: float) -> Group:
        return Group(
            str(index),
            Task(str(index), "?", "x", {"set": of_set}),
            [attempt(f"{of_set}{index}", reward)],
        )

    groups = [group("nq", index, 1.0) for index in range(3)] + [group("musique", 3, 0.0)]
    by_set = metrics_by_set(groups, REGISTERED)
    assert {name: metrics["eval/exact_match"] for name, metrics in by_set.items()} == {
        "nq": 1.0,
        "musique": 0.0,
    }
    assert means_over_sets(by_set, REGISTERED) == {"exact_match": 0.5}
    assert metrics_by_set(groups[:3], REGISTERED) == {}


def test_no_questions_are_no_error(tmp_path: Path) -> None:
    with Rollout.from_pretrained(write_letters_model(tmp_path), Letters()) as rollout:
        assert evaluate(rollout, []).metrics == {
            "eval/questions": 0.0,
            "eval/attempts": 0.0,
            "eval/failed": 0.0,
            "eval/asked": 0.0,
        }


def test_an_evaluation_at_several_temperatures_has_a_row_and_a_folder_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_letters_model(tmp_path / "model")
    words = ["--model", str(model), "--env", REFERENCE, "--questions", "3", "--samples", "4"]
    out = tmp_path / "out"
    assert main(["eval", *words, "--out", str(out), "--temperature", "0,1.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(at for at, line in enumerate(lines) if "pass@4" in line)
    greedy, warm = (line.split() for line in lines[place + 1 : place + 3])
    assert (greedy[0], greedy[3], warm[0]) == ("0", "0%", "1.5")  # greedy attempts are all alike
    assert max(map(len, lines[place : place + 4])) <= 80
    for temperature in ("0", "1.5"):
        summary = json.loads((out / f"temperature-{temperature}" / "summary.json").read_text())
        assert (summary["temperature"], summary["eval/attempts"]) == (float(temperature), 12)
    assert main(["eval", *words, "--out", str(out)]) == 2
    assert "already holds an evaluation" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", *words, "--temperature", "1;2"])
    assert "found '1;2'" in capsys.readouterr().err


def config_of(model: ModelDirectory, *arguments: str) -> RunConfig:
    return evaluation_config(parse(["eval", "--model", "unused", *arguments]), model)


def test_data_are_what_the_environment_takes_them_for(tmp_path: Path) -> None:
    model, corpus = ModelDirectory(tmp_path, "model", None), tmp_path / "it's [wiki].jsonl"
    corpus.write_text("")
    config = config_of(model, "--env", "search", "--data", "a: b #1.jsonl", "--corpus", str(corpus))
    assert config.environment == {
        "name": "search",
        "val": "a: b #1.jsonl",
        "train": None,
        "corpus": str(corpus),
    }


def test_the_data_of_an_environment_over_another_are_that_ones(tmp_path: Path) -> None:
    model = ModelDirectory(tmp_path, "model", None)
    base = "environment.base={name: search, top_k: 5}"
    config = config_of(
        model,
        "--env",
        "rubric",
        base,
        "environment.criteria={won: base_return}",
        "--data",
        "a.jsonl",
    )
    wanted = {"name": "search", "top_k": 5, "val": "a.jsonl", "train": None}
    assert config.environment == {
        "name": "rubric",
        "base": wanted,
        "criteria": {"won": "base_return"},
    }
    named = config_of(model, "--env", "rubric", "environment.base=mathematics", "--data", "a.jsonl")
    assert named.environment["base"] == {"name": "mathematics", "val": "a.jsonl"}
    with pytest.raises(ConfigError, match=r"--data: the environment Letters takes no data"):
        config_of(
            model, "--env", "rubric", f"environment.base.name={REFERENCE}", "--data", "a.jsonl"
        )


def test_an_environment_that_takes_no_data_says_so_by_name(tmp_path: Path) -> None:
    model = ModelDirectory(tmp_path, "model", None)
    with pytest.raises(
        ConfigError, match=r"--data: the environment Letters takes no data .*found x\.jsonl"
    ):
        config_of(model, "--env", REFERENCE, "--data", "x.jsonl")
    with pytest.raises(
        ConfigError,
        match=r"environment\.name: expected an environment, found none; .*Installed: .*search",
    ):
        config_of(model, "--data", "x.jsonl")


def test_an_export_is_evaluated_with_the_configuration_of_its_run(tmp_path: Path) -> None:
    save_config(load_config(None, ["rollout.max_turns=7"]), tmp_path / "config.yaml")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with model_directory(tmp_path / "export", None, print) as model:
        assert config_of(model).rollout.max_turns == 7
        assert (model.path, model.name) == (tmp_path / "export", tmp_path.name)


def test_a_secret_that_a_run_does_not_hold_is_asked_for(tmp_path: Path) -> None:
    known = "environment={name: mathematics, headers: {X-A: s3cret}, url: 'http://me:pw@h/x?key=s3cret', mark: '***'}"
    save_config(
        load_config(None, [known, "rollout.engine={name: embedded, api_key: s3cret}"]),
        tmp_path / "config.yaml",
    )
    given = ["environment.headers.X-A=a", "environment.url=http://h", "rollout.engine.api_key=b"]
    keys = r"environment\.headers\.X-A, environment\.url: .*found \*\*\*.* environment\.headers\.X-A=VALUE environment\.url="
    with pytest.raises(ConfigError, match=keys):
        make_environment(load_config(tmp_path / "config.yaml").environment)
    config = load_config(tmp_path / "config.yaml", given[:2])
    check_secrets({"environment": config.environment})  # and `mark` is no secret
    with pytest.raises(ConfigError, match=r"rollout\.engine\.api_key: expected a value"):
        make_engine(config, Tokenizer.from_pretrained(write_letters_model(tmp_path / "model")))
    check_secrets(to_dict(load_config(tmp_path / "config.yaml", given)))


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--questions", "0", "--questions: expected at least 1, found 0"),
        ("--samples", "-1", "--samples: expected at least 1, found -1"),
        ("--temperature", "-1", "--temperature: expected at least 0, found -1.0"),
        ("--temperature", "nan", "--temperature: expected at least 0, found nan"),
    ],
)
def test_options_out_of_range_are_one_line(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--model", str(tmp_path), option, value]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_second_evaluation_never_replaces_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [new_directory(tmp_path / "runs", "eval-m") for _ in range(3)]
    assert [path.name for path in found] == ["eval-m", "eval-m-2", "eval-m-3"] and all(
        path.is_dir() for path in found
    )
    (found[0] / "summary.json").write_text("{}")
    assert main(["eval", "--model", str(tmp_path), "--out", str(found[0])]) == 2
    error = capsys.readouterr().err
    assert (
        f"--out: {found[0]} already holds an evaluation" in error
        and "--overwrite" in error
        and error.count("\n") == 1
    )
    assert main(["eval", "--model", str(tmp_path), "--out", str(found[0]), "--overwrite"]) != 0
    assert "--out" not in capsys.readouterr().err, "what is wrong then is the model"
    for place in ("config.yaml", "metrics.jsonl"):
        (found[1] / place).write_text("")
        assert main(["eval", "--model", str(tmp_path), "--out", str(found[1]), "--overwrite"]) == 2
        assert "is a run's directory" in capsys.readouterr().err
        (found[1] / place).unlink()
    for place in (str(found[0] / "summary.json"), str(found[0] / "summary.json" / "out")):
        assert main(["eval", "--model", str(tmp_path), "--out", place]) == 2
        assert f"--out: {place} cannot be written" in capsys.readouterr().err


def test_the_interval_of_a_share_ends_where_shares_end() -> None:
    """Shares that are no zeros and ones have an interval that knows no bounds: F1 was 0.97 with an upper end of 1.01."""
    registered = {
        "f1": Metric("share", "of tokens", score=True),
        "points": Metric("points", "in all", score=True),
    }
    attempts = [attempt("a", 1.0), attempt("b", 1.0), attempt("c", 0.9)]
    for one in attempts:
        one.metrics = {"f1": one.reward, "points": one.reward}
    metrics = evaluation.evaluation_metrics(attempts, registered)
    assert metrics["eval/f1_high"] == 1.0 < metrics["eval/points_high"]
    assert metrics["eval/f1_low"] == metrics["eval/points_low"]
