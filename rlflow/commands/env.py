"""`rlflow env new | check | play`: environments without a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.commands.options import Commands, add_command, quoted

if TYPE_CHECKING:
    from rlflow.environment import Environment


def add(commands: Commands) -> None:
    """Adds the command and its actions."""
    parser = commands.add_parser("env", help="write, check and play environments, without a model")
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    new = add_command(
        actions,
        "new",
        run_new,
        "write a new environment and its test",
        "Writes NAME.py, an environment of at most 30 lines that works, and test_NAME.py, which passes.",
        "example:\n  rlflow env new my_task && rlflow env check my_task.py:MyTask && rlflow env play my_task.py:MyTask\n",
    )
    new.add_argument("name", metavar="NAME", help="snake_case; the class gets the CamelCase of it")
    new.add_argument("--directory", default=".", metavar="DIR", help="where to write (default: here)")
    check = add_command(
        actions,
        "check",
        run_check,
        "check an environment against the contract",
        "Plays random and scripted agents against the environment and reports, one line each, what breaks the\n"
        "contract: tasks, fresh state, finite rewards, an end, no shared state between concurrent episodes, close.",
        "example:\n  rlflow env check my_task.py:MyTask --set difficulty=3\n",
    )
    play = add_command(
        actions,
        "play",
        run_play,
        "play an environment in the terminal",
        "You are the policy: read the prompt, write a response, see what the environment answers. A response ends\n"
        "with an empty line or with one of the stop strings.",
        "example:\n  rlflow env play my_task.py:MyTask --split val --task 3\n",
    )
    for action in (check, play):
        _add_environment_options(action)
    check.add_argument("--episodes", type=int, default=32, metavar="N", help="episodes of each agent (default 32)")
    check.add_argument("--turns", type=int, default=16, metavar="N", help="turn limit of an episode (default 16)")
    check.add_argument("--seed", type=int, default=0, metavar="N")
    play.add_argument("--split", default="train", metavar="SPLIT", help="train (default) or val")
    play.add_argument("--task", default="0", metavar="ID", help="task id or position (default 0)")
    play.add_argument("--turns", type=int, default=16, metavar="N", help="turn limit (default 16)")


def _add_environment_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="an installed name, package.module:Class, or file.py:Class")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a constructor keyword (YAML value)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="take constructor keywords from this file's environment section"
    )


def run_new(args: argparse.Namespace) -> int:
    """Writes an environment and its test, and says what to do with them."""
    from rlflow.commands.scaffold import write_environment

    source, test, reference = write_environment(args.name, Path(args.directory))
    print(f"wrote {source} and {test}\n")
    print(f"  rlflow env check {reference}\n  rlflow env play {reference}\n  python -m pytest {test}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where the contract is broken."""
    from rlflow.commands.check import check_environment

    report = check_environment(_build_environment(args), episodes=args.episodes, max_turns=args.turns, seed=args.seed)
    print(report)
    return 0 if report.passed else 1


def run_play(args: argparse.Namespace) -> int:
    """Lets a person be the policy."""
    from rlflow.commands.play import play

    return play(_build_environment(args), split=args.split, task=args.task, max_turns=args.turns)


def _build_environment(args: argparse.Namespace) -> Environment:
    from rlflow.components import ENVIRONMENT
    from rlflow.config.schema import load_config

    overrides = [f"environment.{pair}" for pair in args.set]
    config = load_config(args.config, [f"environment.name={quoted(args.name)}", *overrides])
    environment: Environment = ENVIRONMENT.build(config.environment)
    return environment
