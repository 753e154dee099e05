"""The contract check finds each breach, and nothing in an environment that keeps it."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from rlflow import Environment, Episode, Metric, Step, Task
from rlflow.commands.check import check_environment


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


def test_an_environment_that_keeps_the_contract_has_no_problem_and_every_episode_is_closed() -> None:
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


serial = itertools.count()


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({"tasks": lambda self, split: []}, "tasks('train') is empty"),
        ({"tasks": lambda self, split: [Task("a", "p"), Task("a", "q")]}, "two tasks of 'train' have the id 'a'"),
        ({"tasks": lambda self, split: [Task(f"{next(serial)}", "p")]}, "called twice gives different tasks"),
        ({"tasks": lambda self, split: [{"id": "a"}]}, "expected rlflow.Task, found dict"),
        ({"tasks": lambda self, split: (Task(str(n), "p") for n in range(2))}, "expected a sequence (list) of Task"),
        ({"tasks": lambda self, split: [Task("a", "")]}, "prompt of task 'a' is empty"),
        ({"tasks": lambda self, split: [Task("a", [{"role": "user"}])]}, "a message without role and content"),
        ({"stop": "</answer>"}, "stop: expected a tuple"),
        ({"metrics": ["exact_match"]}, "metrics: expected a mapping of names to rlflow.Metric, found list"),
        ({"metrics": {"exact_match": 0.5}}, "metrics['exact_match']: expected an rlflow.Metric, found float"),
        ({"metrics": {"a/b": Metric("1", "x", score=True)}}, "metrics['a/b']: a score is a number of an episode"),
        ({"reset": lambda self, task: task}, "reset: expected an rlflow.Episode, found Task"),
        ({"reset": lambda self, task: Episode(task, turns=1)}, "expected an episode at turn 0"),
        ({"step": lambda self, episode, response: ("obs", 0.0, False)}, "step: expected an rlflow.Step, found tuple"),
        ({"step": lambda self, episode, response: None}, "is an `await` or a `return` missing?"),
        (
            {"step": lambda self, episode, response: Step(reward=float("nan"))},
            "reward: expected a finite number, found nan",
        ),
        ({"step": lambda self, episode, response: Step(reward="1")}, "reward: expected a finite number, found '1'"),
        ({"step": lambda self, episode, response: Step(terminated=1)}, "terminated: expected True or False, found 1"),
        ({"step": lambda self, episode, response: Step(observation=b"x")}, "observation must be text"),
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
            "rewards: expected a mapping of names to numbers, found 0.5",
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


def test_state_shared_through_reset_is_found() -> None:
    scratch: dict[str, Any] = {"seen": []}
    report = check_environment(broken(reset=lambda self, task: Episode(task, scratch=scratch)), episodes=4)
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
        return Step(terminated=True, metrics={"exact_match": 1.0} if episode.task.answer in response else {})

    report = check_environment(broken(step=step), episodes=8)
    assert report.passed and any("metric 'exact_match' is reported by" in note for note in report.notes)
    scored = broken(step=step, metrics={"exact_match": Metric("share", "of tasks", score=True)})
    assert not any("exact_match" in note for note in check_environment(scored, episodes=8).notes)  # 0 in the others


def test_something_else_than_an_environment_is_refused() -> None:
    report = check_environment(object())  # type: ignore[arg-type]
    assert report.problems == ["expected an instance of rlflow.Environment, found object: derive the class from it"]
