"""`rlflow env new | policy | check | play`: environments, and a tiny policy for them."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.commands.arguments import (
    Commands,
    add_actions,
    add_command,
    add_overrides,
    check_least,
    flag,
    option,
    quoted,
)
from rlflow.errors import ConfigError, as_called, described, raised_at
from rlflow.texts import printable

from . import OURS
from .scaffold import ENVIRONMENT, Scaffold, forms, write_environment

if TYPE_CHECKING:
    from rlflow.environment import Environment
    from rlflow.types import Task

    from .checks.agents import Agent, Said
    from .imitation import Lessons

TURNS, LESSONS = 6, 300  # of a demonstration; optimizer steps of the imitation
LEARNING = (
    "trainer.lr=5e-4",
    "rollout.max_total_tokens=512",
    "rollout.max_response_tokens=32",
    "metrics.page=true",
)


def add(commands: Commands) -> None:
    """Adds the command and its actions."""
    told = "write, check and play environments, and make a tiny policy for them"
    actions = add_actions(commands, "env", told)
    _add_new(actions)
    policy = add_command(
        actions,
        "policy",
        run_policy,
        "make a tiny policy that imitates a scripted player",
        """
        A function plays the environment; a tiny random model learns to write as it does, by
        supervised fine-tuning. It knows the form of the task and plays it badly: a start for
        reinforcement learning on a laptop.
        """,
        "rlflow env policy my_task.py:MyTask my_task_player.py:play --out my_policy --overwrite",
    )
    check = add_command(
        actions,
        "check",
        run_check,
        "check an environment against the contract",
        """
        Plays random and scripted agents against the environment and reports, one line each, what
        breaks the contract: tasks, fresh state, finite rewards, an end, no shared state between
        concurrent episodes, close.
        """,
        "rlflow env check my_task.py:MyTask environment.highest=99",
    )
    play = add_command(
        actions,
        "play",
        run_play,
        "play an environment in the terminal",
        """
        You are the policy: read the prompt, write a response, see what the environment answers. A
        response ends with an empty line or with one of the stop strings.
        """,
        "rlflow env play my_task.py:MyTask --split val --task 3",
    )
    for action in (policy, check, play):
        _add_environment_options(action, player=action is policy)
    _add_limits(policy, check, play)


def _add_new(actions: Commands) -> None:
    new = add_command(
        actions,
        "new",
        run_new,
        "write a new environment and its test, or all that a first training needs",
        """
        Writes NAME.py, an environment of at most 30 lines that works, and test_NAME.py, which
        passes. With one of the forms it also writes what trains a tiny policy on it, which starts
        near zero and learns nearly all in a few minutes on two cores. It ends with the commands
        that come next.
        """,
        """
        rlflow env new my_task && rlflow env check my_task.py:MyTask
        rlflow env new my_task --policy && rlflow train --config my_task.yaml
        """,
    )
    new.add_argument("name", metavar="NAME", help="snake_case; the class gets the CamelCase of it")
    option(new, "--directory", "DIR", "where to write", default=".")
    group = new.add_argument_group("forms", "at most one of them")
    choice = group.add_mutually_exclusive_group()
    for name, form in forms().items():
        flag(choice, f"--{name}", form.help)


def _add_limits(
    policy: argparse.ArgumentParser,
    check: argparse.ArgumentParser,
    play: argparse.ArgumentParser,
) -> None:
    option(
        policy,
        "--out",
        "DIR",
        "the HuggingFace directory that is written",
        required=True,
    )
    flag(policy, "--overwrite", "replace a model in --out")
    option(policy, "--steps", "N", "optimizer steps", default=LESSONS)
    option(policy, "--turns", "N", "turn limit of an episode", default=TURNS)
    option(policy, "--seed", "N", "of the episodes and the model", default=0)
    again = "play so many of each manner once, where an episode takes long; default: new ones"
    option(policy, "--episodes", "N", again, type=int)
    of = "of the model: qwen2, qwen3_moe, glm4_moe, ..."
    option(policy, "--family", "NAME", of, default="qwen2")
    player = "file.py:function, as of `env policy`: a scripted player that plays too"
    option(check, "--player", "PLAYER", player)
    option(play, "--player", "PLAYER", "such a function plays, and you watch")
    option(check, "--episodes", "N", "episodes of each agent", default=32)
    option(check, "--seed", "N", "of the agents", default=0)
    option(play, "--split", "SPLIT", "train or val", default="train")
    option(play, "--task", "ID", "task id or position", default="0")
    for action in (check, play):
        option(action, "--turns", "N", "turn limit of an episode", default=16)


def _add_environment_options(parser: argparse.ArgumentParser, player: bool) -> None:
    named = "an installed name, package.module:Class, or file.py:Class"
    parser.add_argument("name", metavar="NAME", help=named)
    if player:
        function = "(prompt, [(response, observation)], generator, clumsy) -> response"
        parser.add_argument("player", metavar="PLAYER", help=f"file.py:function of {function}")
    option(parser, "--config", "FILE", "keywords from this file's environment section")
    keyword = "a constructor keyword; the value is YAML"
    add_overrides(parser, "environment.key=value", keyword)


def run_new(args: argparse.Namespace) -> int:
    """Writes a project and, where its form has one, a policy; says what to do with them."""
    chosen = [form for name, form in forms().items() if getattr(args, name.replace("-", "_"))]
    made = write_environment(args.name, Path(args.directory), *(chosen or [ENVIRONMENT]))
    written = made.files
    if made.form.lessons is not None:
        try:
            _teach(made)
        except BaseException:  # Ctrl-C too: the same command can be given again
            for path in written:
                _remove_with_bytecode(path)
            raise
        written = [*written, made.policy]
    print(f"wrote {', '.join(map(str, written))}\n")
    print("\n".join(f"  {as_called(command)}" for command in made.following()))
    return 0


def _remove_with_bytecode(path: Path) -> None:
    """Removes a file, and what Python kept of it when it was imported."""
    path.unlink(missing_ok=True)
    if path.suffix == ".py":
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.unlink(missing_ok=True)
        with suppress(OSError):  # other modules' bytecode is there, or none ever was
            cached.parent.rmdir()


def _teach(made: Scaffold) -> None:
    """Makes the policy of a new project in its environment."""
    from .imitation import Lessons

    wanted = {"steps": LESSONS, "turns": TURNS, **(made.form.lessons or {})}
    if made.configuration in made.files:
        environment = _environment(None, str(made.configuration))
    else:
        environment = _environment(made.reference)
    with _shut_down(environment):
        _make_policy(environment, made.player, made.policy, Lessons(**wanted))


def run_policy(args: argparse.Namespace) -> int:
    """Makes a tiny policy by imitation of a scripted player."""
    from .imitation import Lessons

    check_least(args, steps=1, turns=1, episodes=1)
    lessons = Lessons(
        args.steps,
        turns=args.turns,
        seed=args.seed,
        family=args.family,
        episodes=args.episodes,
    )
    environment = _environment(args.name, args.config, args.overrides)
    with _shut_down(environment):
        _make_policy(environment, args.player, Path(args.out), lessons, overwrite=args.overwrite)
    words = ["--config", args.config] if args.config else []
    words += [
        "--model",
        args.out,
        "--env",
        args.name,
        f"run.name={Path(args.out).name}",
    ]
    words += [f"rollout.max_turns={args.turns}", *LEARNING, *args.overrides]
    following = shlex.join(words)
    print(f"wrote {args.out}\n\n  {as_called(f'rlflow train {following}')}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where the contract is broken."""
    from rlflow.components import Kind
    from rlflow.run.interrupt import InterpreterWatch

    from .checks.environments import LIMIT_S, check_environment

    check_least(args, episodes=1, turns=1)
    player = Kind("player").resolve(args.player) if args.player else None
    environment = _environment(args.name, args.config, args.overrides)
    watch = InterpreterWatch(LIMIT_S, "env check waits no longer")
    with _shut_down(environment), watch:
        report = check_environment(
            environment,
            episodes=args.episodes,
            max_turns=args.turns,
            seed=args.seed,
            player=player,
        )
    print(printable(str(report)))
    return 0 if report.passed else 1


def run_play(args: argparse.Namespace) -> None:
    """Lets a person be the policy, or shows how a scripted player is."""
    from rlflow.components import Kind

    from .play import play

    check_least(args, turns=1)
    agent = _watched(Kind("player").resolve(args.player)) if args.player else None
    environment = _environment(args.name, args.config, args.overrides)
    with _shut_down(environment):
        play(environment, split=args.split, task=args.task, max_turns=args.turns, agent=agent)


def _watched(player: Callable[..., str]) -> Agent:
    """The player at its best; what it raises is one line. Raises ConfigError."""
    from .checks.agents import player_agent

    agent = player_agent(player, seed=0)

    def respond(task: Task, shown: Task, said: Said) -> str:
        try:
            return agent(task, shown, said)
        except Exception as error:
            where = raised_at(error, OURS)
            told = described(error) + (f" ({where})" if where else "")
            raise ConfigError(f"--player: expected a response, it raised {told}.") from error

    return respond


@contextmanager
def _shut_down(environment: Environment) -> Iterator[None]:
    """Afterwards nothing that the environment started runs any longer."""
    try:
        yield
    finally:
        environment.shutdown()


def _environment(
    name: str | None, config_file: str | None = None, overrides: list[str] | None = None
) -> Environment:
    """name: None: the configuration's."""
    from rlflow.config.foreign import read_config
    from rlflow.run.assemble import make_environment

    named = [] if name is None else [f"environment.name={quoted(name)}"]
    config, _ = read_config(config_file, [*named, *(overrides or [])])
    return make_environment(config.environment)


def _make_policy(
    environment: Environment,
    player: str,
    out: Path,
    lessons: Lessons,
    overwrite: bool = False,
) -> None:
    """Imitates the player, with a line every 50 steps."""
    from rlflow.components import Kind

    from .imitation import make_policy

    began = time.monotonic()
    turns_clumsy = math.ceil(lessons.clumsy * lessons.steps)

    def say(step: int, loss: float) -> None:
        if step == turns_clumsy + 1:
            told = (
                "from here on it learns to play clumsily, so that training has something to teach"
            )
            print(f"imitating the player: {told}", file=sys.stderr, flush=True)
        if step % 50 == 0 or step == lessons.steps:
            seconds = f"{time.monotonic() - began:.0f} s"
            done = f"step {step}/{lessons.steps}, {loss:.2f} nats per token, {seconds}"
            print(f"imitating the player: {done}", file=sys.stderr, flush=True)

    played = Kind("player").resolve(player)
    reward = make_policy(environment, played, out, lessons, overwrite=overwrite, say=say)
    print(f"the clumsy player's mean reward is {reward:.2f}", file=sys.stderr)
