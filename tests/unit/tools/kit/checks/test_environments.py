"""The contract check finds each breach, and nothing in an environment that keeps it."""

from __future__ import annotations

import asyncio
import io
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from rlflow_tools.kit.checks import environments
from rlflow_tools.kit.checks.environments import check_environment
from rlflow_tools.kit.play import play

from rlflow import Environment, Episode, Metric, Step, Task
from rlflow.commands.cli import main
from rlflow.environment import check_form
from rlflow.errors import ConfigError


class Good(Environment):
    """Say the number of the task; three turns; keeps its state in scratch."""

    stop = ("</answer>",)

    def __init__(self) -> None:
        self.open = 0

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{n}", f"Say {n}", str(n)) for n in range(5)]

    async def reset(self, task: Task) -> Episode:
        self.open += 1
        return Episode(task, scratch={"seen": []})

    async def step(self, episode: Episode, response: str) -> Any:
        await asyncio.sleep(0)
        episode.scratch["seen"].append(response)
        solved = episode.task.answer in response
        return Step(
            f"{len(episode.scratch['seen'])}: no",
            float(solved),
            solved or episode.turns >= 3,
            {"solved": float(solved)},
        )

    async def close(self, episode: Episode) -> None:
        self.open -= 1


def test_an_environment_that_keeps_the_contract_has_no_problem_and_every_episode_is_closed() -> (
    None
):
    environment = Good()
    report = check_environment(environment, episodes=8)
    assert report.passed and environment.open == 0, str(report)
    assert "the contract holds" in str(report) and "train: 5 tasks" in str(report)


def test_plain_methods_and_named_rewards_are_accepted() -> None:
    class Plain(Good):
        def reset(self, task: Task) -> Episode:  # type: ignore[override]
            return Episode(task)

        def step(self, episode: Episode, response: str) -> Step:
            return Step(terminated=True, rewards={"style": 0.5, "answer": 1})

        def close(self, episode: Episode) -> None:  # type: ignore[override]
            pass

    report = check_environment(Plain(), episodes=4)
    assert report.passed and "named rewards: answer, style" in str(report)


def test_it_works_inside_a_running_event_loop() -> None:
    async def notebook() -> bool:
        return check_environment(Good(), episodes=4).passed

    assert asyncio.run(notebook())


def broken(**methods: Any) -> Environment:
    return type("Broken", (Good,), methods)()


def shared_counter() -> Any:
    """`step` counts turns on the environment and gives the event loop a chance in between."""

    async def reset(self: Any, task: Task) -> Episode:
        self.count = 0
        return Episode(task)

    async def step(self: Any, episode: Episode, response: str) -> Step:
        self.count += 1
        await asyncio.sleep(0.001)
        return Step(f"turn {self.count}", 0.0, episode.turns >= 3)

    async def close(self: Any, episode: Episode) -> None: ...

    return {"reset": reset, "step": step, "close": close}


def paying_less(self: Any, task: Task) -> Episode:
    self.resets = getattr(self, "resets", 0) + 1
    return Episode(task)


def blocking(seconds: Iterator[float]) -> Any:
    async def step(self: Any, episode: Episode, response: str) -> Step:
        time.sleep(next(seconds))
        return Step(terminated=True)

    return step


class Incomparable:
    """As an array is: equal to nothing in one word."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __deepcopy__(self, memo: Any) -> Any:
        return Incomparable()


serial = itertools.count()


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({"tasks": lambda self, split: []}, "tasks('train') is empty"),
        (
            {"tasks": lambda self, split: [Task("a", "p"), Task("a", "q")]},
            "tasks('train'): tasks 0 and 1 have the same id 'a'",
        ),
        (
            {"tasks": lambda self, split: [Task(f"{next(serial)}", "p")]},
            "called twice gives different tasks",
        ),
        ({"tasks": lambda self, split: [{"id": "a"}]}, "expected rlflow.Task, found dict"),
        (
            {"tasks": lambda self, split: (Task(str(n), "p") for n in range(2))},
            "expected a sequence (list) of Task",
        ),
        ({"tasks": lambda self, split: [Task("a", "")]}, "prompt of task 'a' is empty"),
        (
            {"tasks": lambda self, split: [Task("a", [{"role": "user"}])]},
            "a message without role and content",
        ),
        ({"stop": "</answer>"}, "stop: expected a tuple"),
        ({"metrics": ["exact_match"]}, "metrics: expected {name: rlflow.Metric}, found list"),
        (
            {"metrics": {"exact_match": 0.5}},
            "metrics['exact_match']: expected an rlflow.Metric, found float",
        ),
        (
            {"metrics": {"a/b": Metric("1", "x", score=True)}},
            "metrics['a/b']: a score is a number of an episode",
        ),
        (
            {"step": lambda self, response: Step(reward=1.0)},
            "step: expected step(self, episode, response), found step(self, response)",
        ),
        ({"tasks": lambda self: []}, "expected tasks(self, split), found tasks(self)"),
        ({"reset": lambda self, task: task}, "reset: expected an rlflow.Episode, found Task"),
        ({"reset": lambda self, task: Episode(task, turns=1)}, "expected an episode at turn 0"),
        (
            {"step": lambda self, episode, response: ("obs", 0.0, False)},
            "step: expected an rlflow.Step, found tuple",
        ),
        ({"step": lambda self, episode, response: None}, "is an `await` or a `return` missing?"),
        (
            {"step": lambda self, episode, response: Step(reward=float("nan"))},
            "reward: expected a finite number, found nan",
        ),
        (
            {"step": lambda self, episode, response: Step(reward="1")},
            "reward: expected a finite number, found '1'",
        ),
        (
            {"step": lambda self, episode, response: Step(reward=None)},
            "reward: expected a finite number, found None",
        ),
        (
            {"step": lambda self, episode, response: Step(reward=10**400)},
            "reward: expected at most 1e+18 either way",
        ),
        (
            {"step": lambda self, episode, response: Step(metrics=None)},
            "metrics: expected {name: number}",
        ),
        (
            {"step": lambda self, episode, response: sys.exit(3)},
            "step raised SystemExit(3), which is no error of an episode",
        ),
        (
            {"tasks": lambda self, split: [Task(7, "p")]},
            "task id in 'train': expected a non-empty string, found 7",
        ),
        (
            {"tasks": lambda self, split: [Task("a", [1, 2])]},
            "prompt of task 'a' has a message without role and content: 1",
        ),
        (
            {"tasks": lambda self, split: [Task("a", 7)]},
            "prompt of task 'a' must be text or a list of messages, found int",
        ),
        (
            {"tasks": lambda self, split: [Task("a", "p", Incomparable())]},
            "the check cannot go on: ValueError: ambiguous (",
        ),
        (
            {"metrics": {"solve": Metric("share", "x", score=True)}},
            "metrics['solve'] is declared, but no episode reported it; "
            "'solved' was reported: did you mean 'solve' there?",
        ),
        (
            {
                "reset": paying_less,
                "step": lambda self, episode, response: Step(
                    reward=1 / self.resets, terminated=True
                ),
            },
            "gave other rewards, by what earlier episodes left on the environment",
        ),
        (
            {
                "reset": paying_less,
                "step": lambda self, episode, response: Step(
                    reward=self.resets % 2, terminated=True
                ),
            },
            "gave other rewards, by what earlier episodes left on the environment",
        ),
        (
            {"step": blocking(itertools.repeat(0.1))},
            "step is async and blocks the event loop, and with it all",
        ),
        (
            {"step": lambda self, episode, response: Step(terminated=1)},
            "terminated: expected True or False, found 1",
        ),
        (
            {"step": lambda self, episode, response: Step(observation=b"x")},
            "observation must be text",
        ),
        (
            {"step": lambda self, episode, response: Step(metrics={"a": "b"})},
            "metrics: expected names with finite numbers",
        ),
        (
            {"step": lambda self, episode, response: Step(rewards={"style": float("inf")})},
            "rewards: expected names with finite numbers, at most 1e+18 either way, found 'style': inf",
        ),
        (
            {"step": lambda self, episode, response: Step(rewards=0.5)},
            "rewards: expected {name: number}, found 0.5",
        ),
        ({"step": lambda self, episode, response: int(response)}, "step raised ValueError"),
        ({"close": lambda self, episode: 1 / 0}, "close raised ZeroDivisionError"),
        (shared_counter(), "concurrent episodes share state"),
    ],
)
def test_each_breach_is_one_clear_line(methods: dict[str, Any], expected: str) -> None:
    report = check_environment(broken(**methods), episodes=6)
    assert not report.passed
    found = [problem for problem in report.problems if expected in problem]
    assert len(found) == 1 and "\n" not in found[0], str(report)


@pytest.mark.parametrize(
    "methods",
    [
        {"metrics": ["exact_match"]},
        {"step": lambda self, response: Step(reward=1.0)},
        {"metrics": {"solve": Metric("share", "x", score=True)}},
    ],
    ids=["metrics are a list", "signature of step", "misspelt metric"],
)
def test_one_mistake_is_told_once(methods: dict[str, Any]) -> None:
    report = check_environment(broken(**methods), episodes=6)
    assert len(report.problems) == 1, str(report)


def test_a_run_refuses_what_cannot_be_called_before_the_first_episode() -> None:
    with pytest.raises(ConfigError, match=r"expected step\(self, episode, response\)"):
        check_form(broken(step=lambda self, response: Step()))
    with pytest.raises(ConfigError, match=r"metrics: expected .*, found list"):
        check_form(broken(metrics=["exact_match"]))
    check_form(broken())


def test_state_shared_through_reset_is_found() -> None:
    scratch: dict[str, Any] = {"seen": []}
    report = check_environment(
        broken(reset=lambda self, task: Episode(task, scratch=scratch)), episodes=4
    )
    assert any("reset gives two episodes the same state" in problem for problem in report.problems)


def test_a_task_that_playing_changes_is_found() -> None:
    tasks = [Task(str(n), "p", answer=[]) for n in range(3)]

    def step(self: Any, episode: Episode, response: str) -> Step:
        episode.task.answer.append(1)
        return Step(terminated=True)

    report = check_environment(broken(tasks=lambda self, split: tasks, step=step), episodes=4)
    assert any("playing changed a Task" in problem for problem in report.problems)


def test_chance_and_endlessness_are_notes_not_problems() -> None:
    noise = random.Random(0)

    def step(self: Any, episode: Episode, response: str) -> Step:
        return Step(reward=noise.random())

    report = check_environment(broken(step=step), episodes=4, max_turns=3)
    assert report.passed
    assert any("cannot be repeated exactly" in note for note in report.notes)
    assert any("no episode terminated within 3 turns" in note for note in report.notes)


def test_a_metric_that_only_some_episodes_report_is_a_note() -> None:
    def step(self: Any, episode: Episode, response: str) -> Step:
        return Step(
            terminated=True, metrics={"exact_match": 1.0} if episode.task.answer in response else {}
        )

    report = check_environment(broken(step=step), episodes=8)
    assert report.passed and any(
        "metric 'exact_match' is reported by" in note for note in report.notes
    )
    scored = broken(step=step, metrics={"exact_match": Metric("share", "of tasks", score=True)})
    assert not any(
        "exact_match" in note for note in check_environment(scored, episodes=8).notes
    )  # 0 in the others


def test_something_else_than_an_environment_is_refused() -> None:
    report = check_environment(object())  # type: ignore[arg-type]
    assert report.problems == ["expected an rlflow.Environment, found object: derive from it"]


def test_a_failed_step_is_told_with_its_place_and_the_response() -> None:
    report = check_environment(
        broken(step=lambda self, episode, response: int(response)), episodes=6
    )
    found = next(problem for problem in report.problems if "step raised ValueError" in problem)
    assert f"({__file__}:" in found and "; the response was '" in found


class FewPlaces(Good):
    """`reset` waits for one of two places, as one that opens a session does; `close` gives it back."""

    def __init__(self, places: int = 2) -> None:
        super().__init__()
        self.places = threading.Semaphore(places)

    def reset(self, task: Task) -> Episode:  # type: ignore[override]
        self.places.acquire()
        return Episode(task, scratch={"seen": []})

    def step(self, episode: Episode, response: str) -> Step:  # type: ignore[override]
        return Step(terminated=True)

    def close(self, episode: Episode) -> None:  # type: ignore[override]
        self.places.release()


@pytest.mark.parametrize("places", [1, 2, 8])
def test_a_reset_that_waits_for_one_of_few_places_gets_it(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "TOGETHER_S", 0.2)
    monkeypatch.setattr(environments, "LIMIT_S", 5)
    report = check_environment(FewPlaces(places), episodes=40)
    assert report.passed and any(fact.startswith("120 episodes") for fact in report.facts), str(
        report
    )
    assert (places == 1) == any(
        "a second reset waits for the first episode's end" in note for note in report.notes
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            FewPlaces(places=1),
            "no call has ended for 2 s: reset (2 calls)",
        ),  # its one place is taken
        (
            broken(step=blocking(itertools.chain([6.0], itertools.repeat(0.0)))),
            "step (1 calls); step (",
        ),
        (broken(tasks=lambda self, split: time.sleep(6.0)), "tasks('train') (1 calls)"),
    ],
    ids=["reset", "step", "tasks"],
)
def test_what_hangs_is_told_of_and_ends_the_check(
    environment: Environment,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(environments, "WORD_S", 1)
    monkeypatch.setattr(environments, "LIMIT_S", 2)
    if isinstance(environment, FewPlaces):
        environment.places.acquire()
    report = check_environment(environment, episodes=1)
    assert any(expected in problem for problem in report.problems), str(report)
    shown = [line.message for line in caplog.records if line.name.startswith("rlflow")]
    assert any("waiting for" in message for message in shown)


def test_a_prompt_of_text_without_a_stop_string_is_a_note() -> None:
    report = check_environment(broken(stop=()), episodes=4)
    assert any(
        "stop is empty" in note for note in report.notes
    ) and "the contract holds; see the notes" in str(report)
    messages = [Task("a", [{"role": "user", "content": "Say 1"}], "1")]
    report = check_environment(broken(stop=(), tasks=lambda self, split: messages), episodes=4)
    assert not any("stop is empty" in note for note in report.notes)


PLAYER = """
def play(prompt, turns, generator, clumsy):
    return prompt.split()[-1] if len(turns) == 1 else "hm"

def wrong(prompt, turns, generator, clumsy):
    return 7
"""


def test_a_scripted_player_plays_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    call = ["env", "check", f"{__file__}:Good", "--episodes", "4", "--player"]
    assert main([*call, f"{tmp_path}/player.py:play"]) == 0
    assert "the player: 4 episodes, 4 terminated, mean return 1" in capsys.readouterr().out
    assert main([*call, f"{tmp_path}/player.py:wrong"]) == 1
    assert (
        "PROBLEM: the player raised TypeError: expected the text of a response, found 7"
        in capsys.readouterr().out
    )


class Tiring(Good):
    """Counts hints on itself: once they are given, no episode gets one, and none ends."""

    given = 0

    async def step(self, episode: Episode, response: str) -> Step:
        if response == "hint" and self.given < 2:
            self.given += 1
            return Step("here")
        return Step("no more", 0.0 if response == "hint" else 1.0, response == "go")


def ask_and_go(prompt: str, turns: list[Any], generator: random.Random, clumsy: bool) -> str:
    return "go" if len(turns) > 1 and turns[1][1] == "here" else "hint"


def test_state_that_only_a_player_reaches_is_found_where_it_was_used_up_long_ago() -> None:
    report = check_environment(Tiring(), episodes=4, player=ask_and_go)
    assert (
        sum(
            "by what earlier episodes left on the environment" in problem
            for problem in report.problems
        )
        == 1
    ), str(report)
    assert "the player ended no episode within 16 turns" in report.notes
    again = check_environment(Good(), episodes=4, player=lambda prompt, *rest: prompt.split()[-1])
    assert again.passed and not again.notes, str(again)


class CountsDown(Environment):
    """Right by the documentation: it reads what a rollout tells of a response, and ends with its own number of turns."""

    max_turns = 3
    stop = ("</a>",)

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}{n}", "Say a", most_turns=2 if n else None) for n in range(2)]

    async def step(self, episode: Episode, response: str) -> Step:
        most = episode.task.most_turns or self.max_turns
        assert episode.turns_left == most - episode.turns >= 0
        assert len(episode.sampled.texts()) == len(episode.sampled.logprobs) == 1
        reward = numpy.float32(episode.turns_left == 0)
        return Step(f"{episode.turns_left} left\n", reward, numpy.bool_(False))


def test_what_a_rollout_tells_is_told_by_check_and_play_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = check_environment(CountsDown(), episodes=6)
    assert report.passed, str(report)
    assert any("within 3 turns" in note for note in report.notes) and "returns from 1 to 1" in str(
        report
    )
    for task, most in (("0", 3), ("1", 2)):
        play(CountsDown(), task=task, source=io.StringIO("a\n\n" * 9), color="never")
        assert f"turn limit ({most}) reached, return 1" in capsys.readouterr().out
