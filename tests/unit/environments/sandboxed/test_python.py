"""Programs that transform lists: made by rule, scored by cases that the program does not see."""

from __future__ import annotations

import asyncio
import random
import shutil
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.errors import ConfigError
from rlflow.types import Step, Task
from rlflow_environments.sandbox import SandboxError
from rlflow_environments.sandboxed.player import play
from rlflow_environments.sandboxed.python import PythonPrograms, source_of
from rlflow_environments.sandboxed.tasks import TRANSFORMATIONS, made_tasks, rule_of, solution_of

CONFINEMENT = "bubblewrap" if shutil.which("bwrap") else "none"


def environment(**options: Any) -> PythonPrograms:
    return PythonPrograms(**{"confinement": CONFINEMENT, "tasks_per_split": 16, **options})


def answered(made: PythonPrograms, *responses: str, task: Task | None = None) -> list[Step]:
    async def run() -> list[Step]:
        episode = await made.reset(task or made.tasks("train")[0])
        try:
            return [await made.step(episode, response) for response in responses]
        finally:
            await made.close(episode)

    return asyncio.run(run())


def in_tags(program: str) -> str:
    return f"<answer>\n{program}</answer>"


BY_HAND = ([5, 3, 8, 4], [6, 2, 12, 4], [3, 6], [3, 1], [3, 1], [3, 1], [1, 2, 3, 6], [2, 6, 1, 3])
"""What each step, with 2, makes of 3, 1, 6, 2."""


def test_every_step_of_a_rule_computes_what_it_says() -> None:
    for kind, wanted in zip(TRANSFORMATIONS, BY_HAND, strict=True):
        assert eval(kind.expression.format(n=2), {"xs": [3, 1, 6, 2]}) == wanted  # noqa: S307
    steps = [(TRANSFORMATIONS[0], 3), (TRANSFORMATIONS[7], 2)]
    assert rule_of(steps) == "add 3 to each, then reverse their order"
    assert (
        solution_of(steps)
        == "def f(xs):\n    xs = [x + 3 for x in xs]\n    xs = xs[::-1]\n    return xs\n"
    )


def test_rules_are_held_out_and_results_differ() -> None:
    train, val = (made_tasks(split, 300, 2, 2, 0) for split in ("train", "val"))
    rules = [
        {task.prompt.split("Rule: ")[1].split(".\n")[0] for task in tasks} for tasks in (train, val)
    ]
    assert len(rules[0]) > 200 and not rules[0] & rules[1]
    for task in train:
        assert len({str(result) for _, result in task.metadata["cases"]}) > 6
    assert made_tasks("train", 5, 2, 2, 0) == train[:5] != made_tasks("train", 5, 2, 2, 1)


def test_the_solution_is_right_and_no_constant_is() -> None:
    made = environment()
    task = made.tasks("train")[0]
    [right] = answered(made, in_tags(task.answer))
    assert (
        right.reward,
        right.terminated,
        right.metrics["solved"],
        right.metrics["cases_passed"],
    ) == (
        1.0,
        True,
        1.0,
        1.0,
    )
    [fenced] = answered(made, f"Well.<answer>```python\n{task.answer}```\n</answer>")
    assert fenced.reward == 1.0
    shown = task.prompt.split(" = ")[1].split("], f(")[0] + "]"
    [constant] = answered(made, in_tags(f"def f(xs): return {shown}\nprint({shown})\n"))
    assert constant.reward == 0.0 and constant.terminated and constant.metrics["cases_passed"] < 0.5
    assert "Wrong on " in constant.observation


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def f(xs) return xs", "SyntaxError"),
        ("def g(xs): return xs", "KeyError: 'f'"),
        ("def f(xs): return 1 / 0", "ZeroDivisionError"),
        ("def f(xs): return {1}", "not JSON serializable"),
        ("import os, time\nos.fork()\ntime.sleep(60)", "[killed: it ran longer than 1 s]"),
        ("raise SystemExit", "Wrong on 12 of 12 cases."),
        ("", "KeyError: 'f'"),
    ],
)
def test_a_program_that_fails_earns_nothing_and_is_told_why(program: str, said: str) -> None:
    limits = {
        "timeout_s": 1.0 if "sleep" in program else 30.0
    }  # the others may wait for a processor
    [step] = answered(environment(limits=limits), in_tags(program))
    assert step.reward == 0.0 and step.terminated and said in step.observation


def test_answers_cannot_be_forged() -> None:
    """Not by what is written where results go, nor by values that equal everything."""
    made = environment(limits={"timeout_s": 30.0})
    for program in (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'[]')\n    except OSError: pass\ndef f(xs): return xs",
        "class Any(list):\n    def __eq__(self, other): return True\ndef f(xs): return Any()",
        "import json\njson.dumps = lambda value: '[1]'\ndef f(xs): return xs",
        "import sys\ndef f(xs): return str(sys._getframe(1).f_locals)",
    ):
        [step] = answered(made, in_tags(program))
        assert step.reward == 0.0 and step.metrics["cases_passed"] < 0.5, program


def test_programs_are_tried_with_and_without_memory() -> None:
    for kept, last in ((True, "42\n"), (False, "NameError")):
        tried = answered(
            environment(kept=kept), "<python>x = 42</python>", "<python>print(x)</python>", "hm"
        )
        assert not any(step.terminated or step.reward for step in tried)
        assert last in tried[1].observation and "<answer>" in tried[2].observation
        assert tried[2].metrics["programs"] == 2 and tried[2].metrics["failed_programs"] == (
            not kept
        )


def test_another_try_where_they_are_given() -> None:
    made = environment(tries=2)
    wrong, right = answered(
        made, in_tags("def f(xs): return 0\n"), in_tags(made.tasks("train")[0].answer)
    )
    assert (wrong.terminated, wrong.reward, right.terminated, right.reward) == (
        False,
        0.0,
        True,
        1.0,
    )


def test_the_same_answer_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment()
    first = answered(made, in_tags("def f(xs): return 0\n"))
    monkeypatch.setenv("PATH", "")  # now nothing can be started
    monkeypatch.setattr(made, "_judge", None)
    assert [step.observation for step in answered(made, in_tags("def f(xs): return 0\n"))] == [
        first[0].observation
    ]


def test_a_sandbox_that_fails_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error escapes, so that the rollout aborts the episode."""
    made = environment()
    monkeypatch.setattr("rlflow_environments.sandbox.box.command", lambda *_: ["false"])
    with pytest.raises(SandboxError, match="did not start"):
        answered(made, in_tags("def f(xs): return 0\n"))


def test_the_contract_holds_and_the_player_plays() -> None:
    report = check_environment(environment(limits={"timeout_s": 20}), episodes=6, player=play)
    assert report.passed, str(report)
    assert "the player: 6 episodes, 6 terminated, mean return 1" in str(report)


def test_the_clumsy_player_is_sometimes_right() -> None:
    tasks, drawn = made_tasks("train", 400, 1, 1, 0), random.Random(0)
    assert all(play(str(task.prompt), [], drawn, False) == in_tags(task.answer) for task in tasks)
    right = sum(play(str(task.prompt), [], drawn, True) == in_tags(task.answer) for task in tasks)
    assert 0.2 < right / 400 < 0.4


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"environment\.depth: expected at most 8, found 9"):
        environment(depth=9)
    with pytest.raises(ConfigError, match=r"environment\.limits: no limit 'seconds'"):
        environment(limits={"seconds": 3})
    assert source_of("\n```\nx = 1\n```") == "x = 1\n"
