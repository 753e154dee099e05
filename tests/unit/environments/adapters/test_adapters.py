"""Environments of other libraries keep the contract here, and train; each test needs the library, which `tests/run.sh --full`
installs beside rlflow (tests/environments.sh)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow import check_environment, train
from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.types import Episode, Step
from rlflow_environments.adapters.actions import action_of
from tests.fixtures import tiny_model
from tests.flow.letters import letters_config
from tests.reference import ORACLE

HERE = Path(__file__).parent


def one_step(tmp_path: Path, environment: str, *values: str) -> float:
    """The number of episodes of a training step of a random model."""
    from rlflow.report.sinks import read_metrics

    model = tiny_model(tmp_path / "model")
    values = ("rollout.max_total_tokens=900", "rollout.max_response_tokens=4", "rollout.prompts_per_step=2",
              "rollout.samples_per_prompt=2",
              "run.steps=1", f"trainer.backend={ORACLE}", "evaluation.questions=2", "evaluation.final_questions=2",
              "checkpoint.export=false", "metrics.picture=false", "data.max_prompt_tokens=800", *values)  # fmt: skip
    train(letters_config(model, tmp_path, f"environment={environment}", *values))
    return read_metrics(tmp_path / "letters" / "metrics.jsonl")[-1]["rollout/episodes"]


def made(name: str, **keywords: Any) -> Environment:
    environment: Environment = ENVIRONMENT.build({"name": name, **keywords})
    return environment


def keeps_the_contract(environment: Environment, episodes: int = 8) -> None:
    report = check_environment(environment, episodes=episodes)
    assert report.passed, str(report)


def played(
    environment: Environment, *responses: str, task: int = 0, split: str = "train"
) -> tuple[Episode, list[Step]]:
    """The steps of one episode, reset and closed in one event loop, as Rollout does."""

    async def play() -> tuple[Episode, list[Step]]:
        episode = await environment.reset(environment.tasks(split)[task])
        steps = []
        try:
            for response in responses:
                episode.turns += 1
                steps.append(await environment.step(episode, response))
        finally:
            await environment.close(episode)
        return episode, steps

    return asyncio.run(play())


# ------------------------------------------------------------------------------------------------------------- gymnasium


def test_a_gymnasium_game_keeps_the_contract_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    keeps_the_contract(made("gymnasium:Taxi", tasks_per_split=4))
    assert one_step(tmp_path, "{name: 'gymnasium:Taxi', tasks_per_split: 4}") == 4.0


def test_actions_and_rewards_are_the_games_own() -> None:
    gymnasium = pytest.importorskip(
        "gymnasium", reason="gymnasium is not installed: pip install gymnasium"
    )
    environment = made("gymnasium", id="CliffWalking-v1", tasks_per_split=1)
    (task,) = environment.tasks("train")
    assert "Actions: 0 to 3." in task.prompt
    episode, game = environment.reset(task), gymnasium.make("CliffWalking-v1")
    observation, _ = game.reset(seed=task.answer)
    assert episode.task.prompt.endswith(f"{observation}\n")
    for said in ("0\n", "1\n", "nonsense\n", "7\n", "1\n"):
        step = environment.step(episode, said)
        if said.strip() in ("0", "1"):
            observation, reward, *_ = game.step(int(said))
            assert (step.observation, step.reward) == (f"{observation}\n", reward)
        else:
            assert step.observation == "Not an action; one of: 0 to 3.\n" and step.reward == 0
    assert step.metrics["invalid_actions"] == 2.0
    environment.close(episode)
    with pytest.raises(ConfigError, match="gymnasium cannot make 'NoSuch-v0'"):
        made("gymnasium:NoSuch-v0")


TALK = """
import gymnasium
from gymnasium import spaces

class Parrot(gymnasium.Env):
    action_space = spaces.Text(20)
    observation_space = spaces.Dict({"word": spaces.Text(20), "round": spaces.Discrete(3)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.round = "abc"[int(self.np_random.integers(3))] * 2, 0
        return {"word": self.word, "round": 0}, {}

    def step(self, action):
        self.round += 1
        return {"word": self.word, "round": self.round}, float(action == self.word), self.round == 2, False, {}

def shown(observation):
    return f"round {observation['round']}: say {observation['word']}"
"""


def test_a_text_space_and_a_formatter(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip(
        "gymnasium", reason="gymnasium is not installed: pip install gymnasium"
    )
    (tmp_path / "talk.py").write_text(TALK)
    formatter = f"{tmp_path / 'talk.py'}:shown"
    parrot = ENVIRONMENT.resolve(f"{tmp_path / 'talk.py'}:Parrot")  # any Kind finds a file's class
    gymnasium.register("rlflow/Parrot-v0", parrot, max_episode_steps=9)
    environment = made("gymnasium:rlflow/Parrot-v0", formatter=formatter)
    keeps_the_contract(environment)
    episode = environment.reset(environment.tasks("train")[0])
    word = episode.task.prompt.split()[-1]
    assert episode.task.prompt.endswith(f"round 0: say {word}\n")
    first, second = environment.step(episode, f"{word}\n"), environment.step(episode, "no\n")
    assert (first.observation, first.reward, first.terminated) == (
        f"round 1: say {word}\n",
        1.0,
        False,
    )
    assert (second.reward, second.terminated, second.metrics["finished"]) == (0.0, True, 1.0)


SPACES = """
import gymnasium, numpy
from gymnasium import spaces

PARTS = {"move": spaces.MultiDiscrete([3, 2]), "say": spaces.Text(5), "by": spaces.Box(0.0, 1.0, (2,))}

class Echo(gymnasium.Env):
    observation_space = spaces.Text(1000)

    def __init__(self, kind="Dict", repeats=True):
        self.action_space = spaces.Dict(PARTS) if kind == "Dict" else getattr(spaces, kind)(*KINDS[kind])
        self.repeats = repeats

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed if self.repeats else None)
        return str(self.np_random.integers(10**9)), {}

    def step(self, action):
        return repr(action), 1.0, False, False, {}

KINDS = {"MultiDiscrete": [[3, 2]], "MultiBinary": [2], "Sequence": [spaces.Discrete(2)],
         "Tuple": [(spaces.Discrete(3), spaces.Text(2))]}

def pair(said):
    return tuple(int(one) for one in said.split("+"))
"""


@pytest.fixture
def echo(tmp_path: Path) -> str:
    gymnasium = pytest.importorskip(
        "gymnasium", reason="gymnasium is not installed: pip install gymnasium"
    )
    (tmp_path / "echo_game.py").write_text(SPACES)
    gymnasium.register("rlflow/Echo-v0", ENVIRONMENT.resolve(f"{tmp_path / 'echo_game.py'}:Echo"), max_episode_steps=99,
                       disable_env_checker=True)  # fmt: skip
    return "gymnasium:rlflow/Echo-v0"


@pytest.mark.parametrize(
    ("kind", "actions", "right", "wrong"),
    [
        ("Dict", '{"by": [(2,) of 0 to 1], "move": [0 to 2, 0 to 1], "say": text} as JSON',
         '{"move": [2, 1], "say": "hi", "by": [0, 0.5]}',
         ('{"move": [2, 2], "say": "hi", "by": [0, 0.5]}', '{"move": [2, 1], "say": "hi"}', "[2, 1]", "[" * 5_000, "hi",
          '{"move": [2, 0.5], "say": "hi", "by": [0, 0.5]}', '{"move": [2, [1]], "say": 3, "by": []}')),
        ("MultiDiscrete", "[0 to 2, 0 to 1] as JSON", "[2, 1]", ("2 1", "[1.0, 1]", "[true, true]", "[2]", "9" * 9_999)),
        ("MultiBinary", "[(2,) of 0 and 1] as JSON", "[1, 0]", ("[1, 2]", "null")),
        ("Tuple", "[0 to 2, text] as JSON", '[1, "a"]', ('[3, "a"]', '[1]', '{"0": 1, "1": "a"}', '[true, "a"]',
         f'[{10**20}, "a"]')),
    ],
)  # fmt: skip
def test_actions_of_several_parts_are_json(
    kind: str, actions: str, right: str, wrong: tuple[str, ...], echo: str
) -> None:
    environment = made(echo, options={"kind": kind}, tasks_per_split=2)
    episode = environment.reset(environment.tasks("train")[0])
    assert f"Actions: {actions}." in episode.task.prompt
    assert environment.step(episode, right).reward == 1.0
    for said in wrong:
        assert environment.step(episode, said).observation.startswith("Not an action"), said
    assert environment.step(episode, "").metrics["invalid_actions"] == len(wrong) + 1
    keeps_the_contract(environment)


def test_numbers_beyond_a_spaces_type_do_not_wrap() -> None:
    spaces = pytest.importorskip(
        "gymnasium", reason="gymnasium is not installed: pip install gymnasium"
    ).spaces
    pixels, free = spaces.Box(0, 255, (2,), "uint8"), spaces.Box(-np.inf, np.inf, (2,))
    for space, said in ((spaces.MultiBinary(2), "[256, 257]"), (spaces.MultiDiscrete([3, 3], "int8"), "[257, 2]"),
                        (pixels, "[256, 3]"), (pixels, "[3.9, 3]"), (pixels, '["1", 3]'),
                        (free, "[1e400, 1]"), (free, "[1e39, 1]")):  # fmt: skip
        with pytest.raises(ValueError, match="not"):
            action_of(space, said)
    assert pixels.contains(action_of(pixels, "[255, 3.0]"))


def test_a_game_whose_reset_fails_is_closed(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = made(echo, options={"kind": "Dict"}, tasks_per_split=2)
    closed: list[int] = []
    monkeypatch.setattr("gymnasium.Wrapper.reset", lambda self, **options: 1 / 0)
    monkeypatch.setattr("gymnasium.Wrapper.close", lambda self: closed.append(1))
    with pytest.raises(ZeroDivisionError):
        environment.reset(environment.tasks("train")[0])
    assert closed


def test_a_reader_makes_the_actions_of_any_space(echo: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"has actions of Sequence\(Discrete\(2\), stack=False\).*environment\.reader",
    ):
        made(echo, options={"kind": "Sequence"})
    environment = made(echo, options={"kind": "Sequence"}, reader=f"{tmp_path}/echo_game.py:pair")
    episode = environment.reset(environment.tasks("train")[0])
    assert environment.step(episode, "1+0+1\n").observation == "(1, 0, 1)\n"
    assert (
        environment.step(episode, "1+2\n").reward == environment.step(episode, "one").reward == 0.0
    )


def test_a_game_whose_seeds_do_not_repeat_is_told_of(
    echo: str, caplog: pytest.LogCaptureFixture
) -> None:
    made(echo)
    assert "same seed" not in caplog.text
    made(echo, options={"repeats": False})
    assert "begins differently each time it is reset with the same seed" in caplog.text


# --------------------------------------------------------------------------------------------------------- reasoning_gym


def test_problems_of_reasoning_gym_keep_the_contract_are_scored_by_its_rule_and_train(
    tmp_path: Path,
) -> None:
    pytest.importorskip(
        "reasoning_gym", reason="reasoning_gym is not installed: pip install reasoning-gym"
    )
    environment = made("reasoning_gym:basic_arithmetic", tasks_per_split=6)
    keeps_the_contract(environment)
    for split in ("train", "val"):
        for task in environment.tasks(split):
            assert environment.step(Episode(task), f"{task.answer}\n").reward == 1.0
            assert environment.step(Episode(task), "neither\n").reward < 1.0
    assert {task.prompt for task in environment.tasks("train")} != {
        task.prompt for task in environment.tasks("val")
    }
    with pytest.raises(ConfigError, match="Did you mean 'basic_arithmetic'"):
        made("reasoning_gym:basic_arithmetics")
    assert one_step(tmp_path, "{name: 'reasoning_gym:basic_arithmetic', tasks_per_split: 6}") == 4.0


@pytest.mark.parametrize(
    ("dataset", "answer", "score"),
    [
        ("binary_matrix", "__import__('os').system('touch {}')", 0.0),
        ("n_queens", "exit()", 0.0),
        ("spiral_matrix", "[0]*9**9", 0.0),
        ("string_insertion", "open('{}', 'w')", 0.0),
        ("countdown", "9**9**7", 0.0),
        ("puzzle24", "99999999!", 0.0),
        ("polynomial_multiplication", "x.__class__", 0.0),
        ("simple_integration", "((((9**99)**99)**99)**99)**99", 0.0),
        ("intermediate_integration", "9**9**9 + C", 0.0),
        ("simple_integration", "9" * 1_900 + "!", 0.0),
        ("countdown", "1 + 1", 0.05),  # the data set's own for a sum of other numbers
        ("countdown", "(" * 1_999, 0.01),
        ("spiral_matrix", "-" * 2_000, 0.0),
        ("prime_factorization", "I do not know", 0.0),
        ("coin_flip", "1e999", 0.0),
        ("game_of_life", "{}", 0.0),
    ],
)
def test_an_answer_is_neither_run_as_code_nor_an_error(
    dataset: str, answer: str, score: float, tmp_path: Path
) -> None:
    pytest.importorskip(
        "reasoning_gym", reason="reasoning_gym is not installed: pip install reasoning-gym"
    )
    environment = made(f"reasoning_gym:{dataset}", tasks_per_split=1)
    episode = Episode(environment.tasks("train")[0])
    assert environment.step(episode, answer.replace("{}", str(tmp_path / "made"))).reward == score
    assert not (tmp_path / "made").exists()


def test_lists_that_a_rule_reads_and_options_that_it_refuses() -> None:
    pytest.importorskip(
        "reasoning_gym", reason="reasoning_gym is not installed: pip install reasoning-gym"
    )
    environment = made("reasoning_gym:binary_matrix", tasks_per_split=1)
    task = environment.tasks("train")[0]
    listed = [[int(number) for number in line.split()] for line in task.answer.splitlines()]
    assert environment.step(Episode(task), str(listed)).reward == 0.1
    for options, told in (({"seed": 1}, "'seed' is environment.seed"), ({"p": 1}, "cannot make .* TypeError"),
                          ({"min_n": -5}, "cannot make .* AssertionError")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"environment.options: .*{told}"):
            made("reasoning_gym:binary_matrix", options=options)


# --------------------------------------------------------------------------------------------------------------- openenv


@contextmanager
def served(sessions: int, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the game of openenv_server.py, played by openenv's own server, and its process."""
    pytest.importorskip("openenv", reason="openenv is not installed: pip install openenv")
    command = [sys.executable, str(HERE / "openenv_server.py"), str(sessions), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, "the server ended before it served"
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_of_openenv_keeps_the_contract_and_trains(tmp_path: Path) -> None:
    import random

    with served(64) as (url, _):
        environment = made(f"openenv:{url}")
        keeps_the_contract(environment)
        for number, task in enumerate(environment.tasks("val")[:3]):
            right = random.Random(task.answer).randrange(10)  # as the server draws it
            episode, steps = played(
                environment, "x\n", f"{(right + 1) % 10}\n", f"{right}\n", task=number, split="val"
            )
            assert (
                episode.task.prompt.endswith("Which number?\n") and "integer" in episode.task.prompt
            )
            assert steps[0].observation.startswith("Not an action: Invalid message")
            hint = "lower" if (right + 1) % 10 > right else "higher"
            assert [(step.observation, step.reward, step.terminated) for step in steps[1:]] == [
                (f"{hint}\n", 0.0, False),
                ("right\n", 1.0, True),
            ]
            assert steps[-1].metrics == {"finished": 1.0, "invalid_actions": 1.0}
        assert one_step(tmp_path, f"{{name: 'openenv:{url}', tasks_per_split: 4}}") == 4.0


@pytest.mark.slow
def test_openenvs_own_echo_answers_what_it_is_told() -> None:
    """packages/openenv_echo: unchanged from github.com/meta-pytorch/OpenEnv at 685de411, envs/echo_env/server."""
    action = {
        "type": "call_tool",
        "tool_name": "echo_message",
        "arguments": {"message": "{response}"},
    }
    with served(4, "echo") as (url, _):
        environment = made(f"openenv:{url}", action=action)
        _, steps = played(environment, 'a "b"\n', "ü\n")
        assert [(step.terminated, step.reward) for step in steps] == [(False, 0.0)] * 2
        assert 'a \\"b\\"' in steps[0].observation and "ü" in steps[1].observation
        _, [step] = played(made(f"openenv:{url}", action={**action, "tool_name": "none"}), "x\n")
        assert "Unknown tool" in step.observation or "not found" in step.observation


@pytest.mark.slow
def test_sessions_that_a_server_does_not_have_are_waited_for_and_given_back() -> None:
    from rlflow_environments.adapters.openenv import OpenEnvError

    with served(1) as (url, _):
        keeps_the_contract(
            made(f"openenv:{url}"), episodes=2
        )  # two episodes at a time, one session
        environment = made(f"openenv:{url}", wait_s=0.5)

        async def two() -> None:
            first = await environment.reset(environment.tasks("train")[0])
            with pytest.raises(
                OpenEnvError, match=r"no session within 0.5 s .*max_concurrent_envs"
            ):
                await environment.reset(environment.tasks("train")[1])
            await environment.close(first)
            await environment.close(await environment.reset(environment.tasks("train")[1]))

        asyncio.run(two())


@pytest.mark.slow
def test_a_server_that_fails_hangs_or_dies_aborts_the_episode_in_time() -> None:
    from rlflow_environments.adapters.openenv import OpenEnvError

    with served(8) as (url, process):
        environment = made(
            f"openenv:{url}", action={"number": "{response}"}, timeout_s=1.0, options={"numbers": 1}
        )
        assert played(environment, "0\n")[1][0].reward == 1.0  # `options` reach the server's reset
        with pytest.raises(OpenEnvError, match="'step' failed on the server: out of luck"):
            played(environment, "13\n")
        with pytest.raises(OpenEnvError, match="no answer to 'step' within 1 s"):
            played(environment, "99\n")

        async def killed() -> None:
            episode = await environment.reset(environment.tasks("train")[0])
            process.kill()
            process.wait()
            with pytest.raises(OpenEnvError, match="'step'"):
                await environment.step(episode, "1\n")
            await environment.close(episode)
            with pytest.raises(OpenEnvError, match="no connection"):
                await environment.reset(environment.tasks("train")[0])

        asyncio.run(killed())
        with pytest.raises(
            ConfigError, match=r"environment.url: expected an OpenEnv server, found none"
        ):
            made(f"openenv:{url}")


# ------------------------------------------------------------------------------------------------------------- verifiers


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package verifiers; the tasksets of packages/ can be imported."""
    pytest.importorskip("verifiers.v1", reason="needs: pip install 'verifiers>=0.4'")
    monkeypatch.syspath_prepend(HERE / "packages")


@pytest.mark.slow
def test_tasksets_of_verifiers_keep_the_contract_are_scored_by_their_rewards_and_train(
    tasksets: None, tmp_path: Path
) -> None:
    environment = made("verifiers:sums_taskset")
    keeps_the_contract(environment)
    assert [len(environment.tasks(split)) for split in ("train", "val")] == [22, 3]
    system, question = environment.tasks("val")[1].prompt
    assert (
        system == {"role": "system", "content": "Only the number."}
        and question["content"] == "2 + 0 ="
    )
    for response, right in (("2", 1.0), (" 2\n", 1.0), ("3", 0.0)):
        _, (step,) = played(environment, response, task=1, split="val")
        assert step.terminated and step.reward == 2 * right  # the reward's weight
        assert step.metrics == {"characters": len(response.strip()), "rubric": 2 * right}
    assert one_step(tmp_path, "{name: 'verifiers:sums_taskset', options: {most: 3}}") == 4.0
