"""`rlflow env new | policy | check | play`: environments without a model, and a tiny policy for
them."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.commands.arguments import Commands, add_command, check_least, quoted
from rlflow.errors import as_called

if TYPE_CHECKING:
    from rlflow.algorithms.imitation import Lessons
    from rlflow.environment import Environment

TURNS, LESSONS = 6, 300  # of a demonstration; optimizer steps of the imitation
LEARNING = (
    "trainer.lr=5e-4",
    "rollout.max_total_tokens=512",
    "rollout.max_response_tokens=32",
    "metrics.page=true",
)


def add(commands: Commands) -> None:
    """Adds the command and its actions."""
    parser = commands.add_parser(
        "env", help="write, check and play environments, and make a tiny policy for them"
    )
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    new = add_command(
        actions,
        "new",
        run_new,
        "write a new environment and its test",
        "Writes NAME.py, an environment of at most 30 lines that works, and test_NAME.py, which passes.\n"
        "With --policy also NAME_player.py (a clumsy scripted player), NAME_policy (a tiny model that imitates it; half a\n"
        "minute on two cores) and NAME.yaml: `rlflow train --config NAME.yaml` then shows it learning, in two minutes.",
        "examples:\n  rlflow env new my_task && rlflow env check my_task.py:MyTask && rlflow env play my_task.py:MyTask\n"
        "  rlflow env new my_task --policy && rlflow train --config my_task.yaml\n",
    )
    new.add_argument("name", metavar="NAME", help="snake_case; the class gets the CamelCase of it")
    new.add_argument(
        "--directory", default=".", metavar="DIR", help="where to write (default: here)"
    )
    new.add_argument(
        "--policy",
        action="store_true",
        help="also a scripted player, a tiny policy that imitates it, a configuration",
    )
    policy = add_command(
        actions,
        "policy",
        run_policy,
        "make a tiny policy that imitates a scripted player",
        "A function plays the environment; a tiny random model learns to write as it does, by supervised fine-tuning. It\n"
        "knows the form of the task and plays it badly: a start for reinforcement learning on a laptop.",
        "example:\n  rlflow env policy my_task.py:MyTask my_task_player.py:play --out my_task_policy --overwrite\n",
    )
    check = add_command(
        actions,
        "check",
        run_check,
        "check an environment against the contract",
        "Plays random and scripted agents against the environment and reports, one line each, what breaks the\n"
        "contract: tasks, fresh state, finite rewards, an end, no shared state between concurrent episodes, close.",
        "example:\n  rlflow env check my_task.py:MyTask environment.highest=99\n",
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
    for action in (policy, check, play):
        _add_environment_options(action, player=action is policy)
    _add_limits(policy, check, play)


def _add_limits(
    policy: argparse.ArgumentParser, check: argparse.ArgumentParser, play: argparse.ArgumentParser
) -> None:
    policy.add_argument(
        "--out", required=True, metavar="DIR", help="the HuggingFace directory that is written"
    )
    policy.add_argument("--overwrite", action="store_true", help="replace a model in --out")
    policy.add_argument(
        "--steps",
        type=int,
        default=LESSONS,
        metavar="N",
        help=f"optimizer steps (default {LESSONS})",
    )
    policy.add_argument(
        "--turns",
        type=int,
        default=TURNS,
        metavar="N",
        help=f"turn limit of an episode (default {TURNS})",
    )
    policy.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the episodes and the model (default 0)"
    )
    check.add_argument(
        "--player",
        metavar="PLAYER",
        help="file.py:function, as of `env policy`: a scripted player that plays too",
    )
    check.add_argument(
        "--episodes", type=int, default=32, metavar="N", help="episodes of each agent (default 32)"
    )
    check.add_argument(
        "--turns", type=int, default=16, metavar="N", help="turn limit of an episode (default 16)"
    )
    check.add_argument("--seed", type=int, default=0, metavar="N")
    play.add_argument("--split", default="train", metavar="SPLIT", help="train (default) or val")
    play.add_argument("--task", default="0", metavar="ID", help="task id or position (default 0)")
    play.add_argument("--turns", type=int, default=16, metavar="N", help="turn limit (default 16)")


def _add_environment_options(parser: argparse.ArgumentParser, player: bool) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="an installed name, package.module:Class, or file.py:Class"
    )
    if player:
        parser.add_argument(
            "player",
            metavar="PLAYER",
            help="file.py:function of (prompt, [(response, observation)], generator, clumsy) -> response",
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="take constructor keywords from this file's environment section",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="environment.key=value",
        help="a constructor keyword; the value is YAML",
    )


def run_new(args: argparse.Namespace) -> int:
    """Writes an environment and its test, on demand what trains a policy on it too, and says what
    to do with them."""
    from rlflow.commands.scaffold import write_environment

    made = write_environment(args.name, Path(args.directory), policy=args.policy)
    reference, test = shlex.quote(made.reference), shlex.quote(str(made.test))
    pytest = "" if find_spec("pytest") else "pip install pytest && "
    following = [
        f"rlflow env check {reference}",
        f"rlflow env play {reference}",
        f"{pytest}python -m pytest {test}",
    ]
    written = [made.source, made.test]
    if args.policy:
        from rlflow.algorithms.imitation import Lessons

        written += [made.player_file, made.configuration]
        try:
            _make_policy(
                _environment(made.reference),
                made.player,
                made.policy,
                Lessons(steps=LESSONS, turns=TURNS),
            )
        except BaseException:  # Ctrl-C too: the same command can be given again
            for path in written:
                path.unlink(missing_ok=True)
            raise
        written.append(made.policy)
        following.append(f"rlflow train --config {shlex.quote(str(made.configuration))}")
    print(f"wrote {', '.join(map(str, written))}\n")
    print("\n".join(f"  {as_called(command)}" for command in following))
    return 0


def run_policy(args: argparse.Namespace) -> int:
    """Makes a tiny policy by imitation of a scripted player."""
    from rlflow.algorithms.imitation import Lessons

    check_least(args, steps=1, turns=1)
    lessons = Lessons(steps=args.steps, turns=args.turns, seed=args.seed)
    environment = _environment(args.name, args.config, args.overrides)
    _make_policy(environment, args.player, Path(args.out), lessons, overwrite=args.overwrite)
    words = ["--config", args.config] if args.config else []
    words += [
        "--model",
        args.out,
        "--env",
        args.name,
        f"run.name={Path(args.out).name}",
        f"rollout.max_turns={args.turns}",
    ]
    following = shlex.join([*words, *LEARNING, *args.overrides])
    print(f"wrote {args.out}\n\n  {as_called(f'rlflow train {following}')}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where the contract is broken."""
    from rlflow.checks.environments import LIMIT_S, check_environment
    from rlflow.components import Kind
    from rlflow.run.interrupt import InterpreterWatch

    check_least(args, episodes=1, turns=1)
    player = Kind("player").resolve(args.player) if args.player else None
    environment = _environment(args.name, args.config, args.overrides)
    with InterpreterWatch(LIMIT_S, "env check waits no longer"):
        report = check_environment(
            environment, episodes=args.episodes, max_turns=args.turns, seed=args.seed, player=player
        )
    print(report)
    return 0 if report.passed else 1


def run_play(args: argparse.Namespace) -> int:
    """Lets a person be the policy."""
    from rlflow.commands.play import play

    environment = _environment(args.name, args.config, args.overrides)
    return play(environment, split=args.split, task=args.task, max_turns=args.turns)


def _environment(
    name: str, config_file: str | None = None, overrides: list[str] | None = None
) -> Environment:
    from rlflow.components import ENVIRONMENT
    from rlflow.config.schema import load_config

    config = load_config(config_file, [f"environment.name={quoted(name)}", *(overrides or [])])
    environment: Environment = ENVIRONMENT.build(config.environment)
    return environment


def _make_policy(
    environment: Environment, player: str, out: Path, lessons: Lessons, overwrite: bool = False
) -> None:
    """Imitates the player, with a line that counts the steps."""
    from rlflow.algorithms.imitation import make_policy
    from rlflow.components import Kind

    began, live = time.monotonic(), sys.stderr.isatty()

    def say(step: int, loss: float) -> None:
        if live or step % 50 == 0 or step == lessons.steps:
            done = f"step {step}/{lessons.steps}, {loss:.2f} nats per token, {time.monotonic() - began:.0f} s"
            line = f"imitating the player: {done}"
            print(
                f"\r{line}" if live else line,
                end="" if live and step < lessons.steps else "\n",
                file=sys.stderr,
                flush=True,
            )

    reward = make_policy(
        environment, Kind("player").resolve(player), out, lessons, overwrite=overwrite, say=say
    )
    print(f"the clumsy player's mean reward is {reward:.2f}", file=sys.stderr)
