"""Programs that learn from tables: scored by targets that no sandbox holds, staged by prints, timed without the queue."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlflow import check_environment
from rlflow.errors import ConfigError
from rlflow.types import Step, Task
from rlflow_environments.sandboxed import stages
from rlflow_environments.sandboxed.learner import play
from rlflow_environments.sandboxed.ml_engineering import MlEngineering
from rlflow_environments.sandboxed.tables import RULES, TEST_ROWS, TRAIN_ROWS, MadeTable, made_table
from rlflow_environments.wrappers.improve import ImprovePrompts
from rlflow_environments.wrappers.stages import StageRewards
from tests.unit.environments.common.chat_server import ChatServer
from tests.unit.environments.retrieval.search_servers import serving

CONFINEMENT = "bubblewrap" if shutil.which("bwrap") else "none"
WRITES = 'open("predictions.csv", "w").write("{value}\\n" * 200)\n'


def environment(**options: Any) -> MlEngineering:
    return MlEngineering(**{"confinement": CONFINEMENT, "tasks_per_split": 12, **options})


def answered(made: Any, *programs: str, task: Task | None = None) -> list[Step]:
    async def run() -> list[Step]:
        episode = await made.reset(task or made.tasks("train")[0])
        try:
            return [await made.step(episode, f"<python>{program}</python>") for program in programs]
        finally:
            await made.close(episode)

    return asyncio.run(run())


def test_a_score_is_r_squared_or_what_lies_beyond_the_most_frequent_class() -> None:
    numbers, classes = (
        MadeTable("", "", (1.0, 2.0, 3.0, 6.0), False),
        MadeTable("", "", (0.0, 0.0, 0.0, 1.0, 2.0), True),
    )
    assert numbers.score([1, 2, 3, 6]) == 1.0 and numbers.score([3, 3, 3, 3]) == 0.0
    assert (
        numbers.score([1, 2, 3, 4]) == pytest.approx(1 - 4 / 14)
        and numbers.score([1e200] * 4) == 0.0
    )
    assert classes.score([0, 0, 0, 0, 0]) == 0.0 == classes.score([9, 9, 9, 9, 9])
    assert (
        classes.score([0, 0, 0, 1, 0]) == pytest.approx(0.5)
        and classes.score([0, 0, 0, 1, 2]) == 1.0
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_table_can_be_learned_by_neighbours_and_by_no_constant(rule: Any) -> None:
    table = made_table(rule.name, 7)
    train, test = (
        np.loadtxt(one.splitlines(), delimiter=",", skiprows=1) for one in (table.train, table.test)
    )
    assert (
        train.shape == (TRAIN_ROWS, 5)
        and test.shape == (TEST_ROWS, 4)
        and len(table.targets) == TEST_ROWS
    )
    x, y = train[:, :-1], train[:, -1]
    near = np.argsort(((test[:, None] - x) ** 2).sum(2), 1)[:, :7]
    found = (
        [np.bincount(y[one].astype(int)).argmax() for one in near]
        if rule.classes
        else y[near].mean(1)
    )
    assert table.score(found) > 0.15
    assert max(table.score([value] * TEST_ROWS) for value in (0, 1, 2, y.mean())) < 0.02
    assert made_table.__wrapped__(rule.name, 7) == table != made_table(rule.name, 8)


LEARNS = """import numpy as np
def main():
    with open("train.csv") as file:
        rows = np.loadtxt(file, delimiter=",", skiprows=1)
    for _ in range(3): c = np.linalg.lstsq(rows[:, :-1],
        rows[:, -1], rcond=None)[0]
    t = np.loadtxt("test.csv", delimiter=",", skiprows=1)
    np.savetxt("predictions.csv", t @ c)
if True: main()
"""


def test_prints_are_inserted_behind_the_statements_that_complete_a_stage() -> None:
    lines = stages.with_marks(LEARNS, stages.by_patterns(LEARNS), "secret").split("\n")
    marks = {name: next(at for at, line in enumerate(lines) if f"secret {name}" in line)
             for name in stages.STAGES}  # fmt: skip
    assert (
        lines[marks["loaded"]].startswith("    print")
        and "rows = np.loadtxt" in lines[marks["loaded"] - 1]
    )
    assert (
        lines[marks["trained"]].startswith("    print") and "rcond" in lines[marks["trained"] - 1]
    )
    assert "np.savetxt" in lines[marks["predicted"] - 1]
    ast.parse("\n".join(lines))
    for unchanged in ("def f(:\n", "x = 1\n", "\x00", "(" * 500):
        assert stages.by_patterns(unchanged) == []
    one_line = 'import os; rows = open("train.csv").read()\nprint(rows[:2])\n'
    assert stages.by_patterns(one_line) == [(1, "", "loaded")]


def test_a_program_is_scored_staged_and_timed() -> None:
    task = environment().tasks("train")[0]
    assert task.id.startswith("linear/")
    [step] = answered(environment(), LEARNS)
    assert step.observation.startswith(
        "[stage loaded]\n[stage trained]\n[stage predicted]\nScore 0.9"
    )
    assert step.terminated and step.reward == step.metrics["score"] > 0.9
    assert (step.metrics["valid"], step.metrics["stages"], step.metrics["failed_programs"]) == (
        1,
        3,
        0,
    )
    assert 0 < step.metrics["program_s"] < 60


def test_a_mark_that_a_program_prints_itself_is_no_stage() -> None:
    """The very statement that a model inserts, either stream, other text, around a mark of ours."""
    program = """import sys
print("[stage loaded]")
for stream in sys.stdout, sys.stderr:
    print("[stage loaded]", file=stream)
    print(" [stage loaded] [stage trained]", file=stream)
sys.stdout.write("[sta")
fit = print
fit("", end="")
print("ge trained] [stage predicted]")
"""
    [step] = answered(environment(), program)
    shown = str(step.observation)
    assert shown.count("[stage ") == 1 and "\n[stage trained]\nNo predictions" in shown  # of fit()
    assert step.metrics["stages"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said", "valid"),
    [
        ("x = 1\n", "No predictions.csv", 0),
        (WRITES.format(value="1.5") + "1 / 0\n", "ZeroDivisionError", 0),
        (WRITES.format(value="nan"), "expected 200 numbers", 0),
        (WRITES.format(value="1\\n1"), "expected 200 numbers", 0),
        (WRITES.format(value="0"), "Score 0.", 1),
        ("import os\nos.symlink('/etc/passwd', 'predictions.csv')\n", "predictions.csv", 0),
    ],
)
def test_what_is_no_prediction_is_told_and_earns_nothing(
    program: str, said: str, valid: int
) -> None:
    [step] = answered(environment(), program)
    assert said in step.observation and step.metrics["valid"] == valid
    assert (
        step.reward < 0.05
        and "[stage loaded]" not in step.observation
        and step.metrics["stages"] <= 1
    )


@pytest.mark.slow
def test_a_program_finds_two_tables_and_no_target_of_the_hidden_half() -> None:
    looks = "import os\nprint(sorted(os.listdir()), open('test.csv').readline(), len(open('test.csv').readlines()))\n"
    (step,) = answered(environment(), looks)
    found = f"['program.py', 'test.csv', 'tmp', 'train.csv'] x1,x2,x3,x4\n {TEST_ROWS + 1}"
    assert found in str(step.observation), step.observation


@pytest.mark.slow
def test_the_return_is_the_best_of_several_programs() -> None:
    steps = answered(environment(tries=3), WRITES.format(value="0"), LEARNS, "x = 1\n")
    assert [step.terminated for step in steps] == [False, False, True] and steps[2].reward == 0.0
    assert sum(step.reward for step in steps) == pytest.approx(steps[2].metrics["score"])
    assert answered(environment(tries=2), "x = 1")[0].reward == 0.0


@pytest.mark.slow
def test_wrappers_give_stages_and_the_best_so_far() -> None:
    names = {name: rf"\[stage {name}\]" for name in stages.STAGES}
    made = ImprovePrompts(StageRewards(environment(), names, valid="valid"), 1.0)
    loads = 'rows = open("train.csv").read()\n'
    assert answered(made, loads)[0].reward == pytest.approx(-9.9)
    assert answered(made, LEARNS)[0].reward > 0.9 and answered(made, "x = 1")[0].reward == -10.0

    async def prompt() -> str:
        return str((await made.reset(made.tasks("train")[0])).task.prompt)

    assert "np.linalg.lstsq" in asyncio.run(prompt()) and "Score 0.9" in asyncio.run(prompt())


READS = 'rows = open("train.csv").read()\n'


@pytest.fixture
def replies() -> Iterator[Any]:
    def told(reply: str, begins: str = "") -> tuple[str, str]:
        with serving(ChatServer(reply=reply)) as url:
            options = {"url": f"{url}/v1", "model": "m", "tries": 1}
            [step] = answered(environment(instrumenter=options), f"{begins}{READS}x = 1\n")
        return str(step.observation), json.dumps(step.metrics)

    yield told


@pytest.mark.slow
def test_a_model_inserts_the_prints_and_nothing_else(replies: Any) -> None:
    mark = 'print("[stage {}]")\n'.format
    good = f"Here.<python>\n{READS}{mark('loaded')}x = 1\n{mark('trained')}</python>"
    assert replies(good)[0].startswith("[stage loaded]\n[stage trained]\n")
    own = f"<python>\n{mark('trained')}{READS}{mark('loaded')}x = 1\n</python>"
    told, _ = replies(own, mark("trained"))
    assert told.startswith("(stage trained]\n[stage loaded]\nNo predictions")
    other = f"<python>\n{READS}{mark('loaded')}x = 2\n{mark('trained')}{mark('predicted')}</python>"
    for refused in (other, "I cannot."):
        assert replies(refused)[0].startswith("[stage loaded]\nNo predictions"), "patterns instead"


@pytest.mark.slow
def test_the_wait_for_a_place_is_no_part_of_a_turn() -> None:
    made = environment(at_once=1)

    async def one(task: Task) -> Step:
        return await made.step(
            await made.reset(task), "<python>import time; time.sleep(0.4)</python>"
        )

    async def both() -> list[Step]:
        return await asyncio.gather(*map(one, made.tasks("train")[:2]))

    first, second = sorted(asyncio.run(both()), key=lambda step: step.waited_s)
    assert first.waited_s < 0.2 < 0.4 < second.waited_s


@pytest.mark.slow
def test_the_contract_holds_and_the_player_plays() -> None:
    report = check_environment(environment(limits={"timeout_s": 20}), episodes=6, player=play)
    assert report.passed, str(report)
    tasks, draw = environment().tasks("train"), random.Random(0)
    scores = {
        clumsy: [
            answered(environment(), play(str(task.prompt), [], draw, clumsy)[8:-9], task=task)[
                0
            ].reward
            for task in tasks
        ]
        for clumsy in (False, True)
    }
    assert min(scores[False]) > 0.1 and sum(scores[True]) < sum(scores[False])


@pytest.mark.slow
def test_sixty_four_programs_at_once_and_one_that_forks() -> None:
    made = environment(tasks_per_split=64, limits={"timeout_s": 30.0})
    forks = "import os\nwhile True: os.fork()\n"

    async def one(at: int, task: Task) -> Step:
        episode = await made.reset(task)
        program = forks if at == 5 else play(str(task.prompt), [], random.Random(at), False)[8:-9]
        return await made.step(episode, f"<python>{program}</python>")

    async def all_of() -> list[Step]:
        return await asyncio.gather(*[one(at, task) for at, task in enumerate(made.tasks("train"))])

    steps = asyncio.run(all_of())
    assert steps[5].metrics["limits_reached"] == 1 and steps[5].metrics["valid"] == 0
    assert sum(step.metrics["valid"] for step in steps) == 63


def test_options_are_checked() -> None:
    with pytest.raises(
        ConfigError,
        match=r"environment\.rules: no rule 'rings'; expected some of .* Did you mean 'ring'",
    ):
        environment(rules=["rings"])
    with pytest.raises(ConfigError, match="found none"):
        environment(rules=[])
