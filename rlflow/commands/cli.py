"""The command line: rlflow train | eval | env | show | doctor, and what plug-ins add."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from rlflow.errors import ConfigError, RLFlowError

PLUGINS = "rlflow.commands"
"""Entry-point group of functions `add(subparsers) -> None`; each calls `parser.set_defaults(run=function of args)`."""
Run = Callable[[argparse.Namespace], "int | None"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, the error's (2, or a conversion's own) for a problem that the user can
    mend (one line on stderr), 130 for Ctrl-C, 143 for SIGTERM. RLFLOW_DEBUG=1 shows tracebacks."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `my_module:Name` is found from where the user stands, as with `python -m`
    args = parse(arguments)
    try:
        with _warnings_on_stderr():
            return int(args.run(args) or 0)
    except RLFlowError as error:
        if os.environ.get("RLFLOW_DEBUG") == "1":
            raise
        print(f"rlflow: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print("rlflow: interrupted.", file=sys.stderr)
        return getattr(stop, "exit_code", 130)
    except BrokenPipeError:  # `rlflow show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Shows warnings of rlflow on stderr, and lets its information reach a run's log file."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(
                f"rlflow: {self.format(record)}", file=sys.stderr
            )  # today's stderr: a live display may stand in for it

    logger, handler = logging.getLogger("rlflow"), Handler(logging.WARNING)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; `args.run(args)` carries it out."""
    parser = make_parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse gives up on section.key=value words that stand between options; they are legal in any order.
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")]
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}; see rlflow {args.command or ''} --help".replace("  ", " ")
        )
    if rest:
        args.overrides = [*args.overrides, *rest]
    if not hasattr(args, "run"):
        parser.print_help()
        parser.exit(0)
    return args


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, plug-ins' commands included."""
    parser = argparse.ArgumentParser(
        prog="rlflow",
        description="Reinforcement learning for LLM agents, trained with Megatron; everything also runs on two CPU cores.",
        epilog="`rlflow COMMAND --help` explains a command. RLFLOW_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"rlflow {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_train(commands)
    _add_eval(commands)
    _add_env(commands)
    _add_show(commands)
    _add_doctor(commands)
    for entry in sorted(metadata.entry_points(group=PLUGINS), key=lambda entry: entry.name):
        entry.load()(commands)
    return parser


def _version() -> str:
    import rlflow

    return rlflow.__version__


def _command(
    commands: argparse._SubParsersAction, name: str, run: Run, help: str, text: str, epilog: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


# ---------------------------------------------------------------- train


def _add_train(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "train",
        run_train,
        "train a policy",
        "Trains the policy that a configuration describes: rollouts, rewards, Megatron updates, weight sync,\n"
        "evaluation, checkpoints, and at the end a HuggingFace export. Keys and defaults: docs/configuration.md.",
        "examples:\n"
        "  rlflow train --config recipes/searchr1/config/demo.yaml\n"
        "  rlflow train --config demo.yaml run.steps=20 trainer.lr=1e-4 algorithm.losses.0.clip_high=0.28\n"
        "  rlflow train --config demo.yaml run.name=second environment.top_k=5 --dry-run\n"
        "  rlflow train --config demo.yaml --resume\n",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration; a relative `base:` in it is read first")
    add_data_options(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="throw away the files of an earlier run of that name")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the batch plan, and exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key; the value is YAML")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The short forms of the keys that everyone sets."""
    parser.add_argument("--model", metavar="PATH", help="HuggingFace model directory (model.path)")
    parser.add_argument("--train-data", metavar="FILE", help="training questions, jsonl (environment.train)")
    parser.add_argument("--val-data", metavar="FILE", help="validation questions, jsonl (environment.val)")


def train_overrides(args: argparse.Namespace) -> list[str]:
    """The overrides of a train command line: short options first, so that an explicit section.key=value wins."""
    pairs = (("model.path", args.model), ("environment.train", args.train_data), ("environment.val", args.val_data))
    for option, value in (("--model", args.model), ("--train-data", args.train_data), ("--val-data", args.val_data)):
        if value is not None and not Path(value).exists():
            raise ConfigError(f"{option}: {value}: no such file or directory.")
    overrides = [f"{key}={_quoted(value)}" for key, value in pairs if value is not None]
    overrides += [f"run.{name}=true" for name in ("resume", "overwrite") if getattr(args, name)]
    return [*overrides, *args.overrides]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def run_train(args: argparse.Namespace) -> int:
    from rlflow.config.batch_plan import batch_plan
    from rlflow.config.checks import check_config
    from rlflow.config.loading import config_text
    from rlflow.config.schema import load_config

    config = load_config(args.config, train_overrides(args))
    check_config(config)
    if args.dry_run:
        print(f"# resolved configuration\n{config_text(config)}\n# batch plan\n{batch_plan(config)}")
        return 0
    from rlflow.loop import train

    status = train(config)["status"]
    return next((128 + number for number in (signal.SIGINT, signal.SIGTERM) if status.endswith(number.name)), 0)


# ---------------------------------------------------------------- eval


def _add_eval(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "eval",
        run_eval,
        "evaluate a model: a HuggingFace directory, a run, or a checkpoint",
        "Lets a model answer questions with search and reports exact match, F1, searches and turns per question with\n"
        "95% intervals, and writes every trajectory. A question that failed for infrastructure is reported apart.",
        "examples:\n"
        "  rlflow eval --model runs/demo/export --data val.jsonl --corpus corpus.jsonl\n"
        "  rlflow eval --model runs/demo/checkpoints/step_000100     # converted to step_000100.hf first\n"
        "  rlflow eval --model Qwen2.5-3B --config qwen2.5_3b.yaml --data nq.jsonl --questions 500\n",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        required=True,
        help="HuggingFace directory (e.g. a run's export/), a run (its newest checkpoint) or a Megatron checkpoint",
    )
    parser.add_argument(
        "--hf", metavar="PATH", help="config and tokenizer for a checkpoint (default: its run's model.path)"
    )
    parser.add_argument("--data", metavar="PATH", help="questions, or a folder of evaluation sets (environment.val)")
    parser.add_argument("--corpus", metavar="FILE", help="passages to search, jsonl (environment.corpus)")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML configuration: environment and rollout sections are used"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write summary.json and trajectories.jsonl")
    parser.add_argument("--questions", type=int, metavar="N", help="only the first N questions")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="attempts per question (default 1)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key; the value is YAML")


def run_eval(args: argparse.Namespace) -> int:
    from rlflow.commands import eval as evaluation

    return int(evaluation.main(args) or 0)


# ---------------------------------------------------------------- env


def _add_env(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("env", help="write, check and play environments, without a model")
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    new = _command(
        actions,
        "new",
        run_env_new,
        "write a new environment and its test",
        "Writes NAME.py, an environment of at most 30 lines that works, and test_NAME.py, which passes.",
        "example:\n  rlflow env new guess && rlflow env check guess.py:Guess && rlflow env play guess.py:Guess\n",
    )
    new.add_argument("name", metavar="NAME", help="snake_case; the class gets the CamelCase of it")
    new.add_argument("--directory", default=".", metavar="DIR", help="where to write (default: here)")
    named = "an installed name, package.module:Class, or file.py:Class"
    check = _command(
        actions,
        "check",
        run_env_check,
        "check an environment against the contract",
        "Plays random and scripted agents against the environment and reports, one line each, what breaks the\n"
        "contract: tasks, fresh state, finite rewards, an end, no shared state between concurrent episodes, close.",
        "example:\n  rlflow env check search --set corpus=corpus.jsonl --set train=train.jsonl\n",
    )
    play = _command(
        actions,
        "play",
        run_env_play,
        "play an environment in the terminal",
        "You are the policy: read the prompt, write a response, see what the environment answers. A response ends\n"
        "with an empty line or with one of the stop strings.",
        "example:\n  rlflow env play guess.py:Guess --split val --task 3\n",
    )
    for action in (check, play):
        action.add_argument("name", metavar="NAME", help=named)
        action.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="a constructor keyword (YAML value)"
        )
        action.add_argument(
            "--config", metavar="FILE", help="take constructor keywords from this file's environment section"
        )
    check.add_argument("--episodes", type=int, default=32, metavar="N", help="episodes of each agent (default 32)")
    check.add_argument("--turns", type=int, default=16, metavar="N", help="turn limit of an episode (default 16)")
    check.add_argument("--seed", type=int, default=0, metavar="N")
    play.add_argument("--split", default="train", metavar="SPLIT", help="train (default) or val")
    play.add_argument("--task", default="0", metavar="ID", help="task id or position (default 0)")
    play.add_argument("--turns", type=int, default=16, metavar="N", help="turn limit (default 16)")


def run_env_new(args: argparse.Namespace) -> int:
    from rlflow.commands.scaffold import write_environment

    source, test, reference = write_environment(args.name, Path(args.directory))
    print(f"wrote {source} and {test}\n")
    print(f"  rlflow env check {reference}\n  rlflow env play {reference}\n  python -m pytest {test}")
    return 0


def _build_environment(args: argparse.Namespace):
    from rlflow.components import ENVIRONMENT
    from rlflow.config.loading import load_config
    from rlflow.config.schema import RunConfig

    overrides = [f"environment.{pair}" for pair in args.set]
    config = load_config(args.config, [f"environment.name={_quoted(args.name)}", *overrides], RunConfig)
    return ENVIRONMENT.build(config.environment)


def run_env_check(args: argparse.Namespace) -> int:
    from rlflow.commands.check import check_environment

    report = check_environment(_build_environment(args), episodes=args.episodes, max_turns=args.turns, seed=args.seed)
    print(report)
    return 0 if report.passed else 1


def run_env_play(args: argparse.Namespace) -> int:
    from rlflow.commands.play import play

    return play(_build_environment(args), split=args.split, task=args.task, max_turns=args.turns)


# ---------------------------------------------------------------- show, doctor


def _add_show(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "show",
        run_show,
        "show a run: summary and trajectories",
        "Prints a run's summary and sampled episodes: what the policy wrote, what the environment answered (dim),\n"
        "the reward. RUN is a run directory or a .jsonl of trajectories.",
        "examples:\n  rlflow show runs/demo\n  rlflow show runs/demo --step 20 --trajectories 5 --failed\n"
        "  rlflow show runs/demo --eval --solved | less -R\n",
    )
    parser.add_argument("path", metavar="RUN")
    parser.add_argument(
        "--step", type=int, metavar="N", help="episodes of this step (default: the last that was written)"
    )
    parser.add_argument("--eval", action="store_true", help="episodes of the evaluation instead of training")
    parser.add_argument("--trajectories", type=int, default=3, metavar="K", help="how many (default 3)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--failed", action="store_true", help="only episodes with the lowest outcome: no exact match, or no reward"
    )
    kind.add_argument("--solved", action="store_true", help="only episodes with an exact match, or a positive reward")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def run_show(args: argparse.Namespace) -> int:
    from rlflow.commands.show import show

    chosen = "failed" if args.failed else "solved" if args.solved else "all"
    return show(
        args.path, step=args.step, evaluation=args.eval, count=args.trajectories, chosen=chosen, color=args.color
    )


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    _command(
        commands,
        "doctor",
        run_doctor,
        "what is installed, what works together, what is missing for which job",
        "Prints versions against the tested ones, hardware, and for each job what is missing, with the command that\n"
        "installs it. The last line is the verdict; the exit code is 1 when training on this machine is not possible.",
    )


def run_doctor(args: argparse.Namespace) -> int:
    from rlflow.commands.doctor import diagnose

    return diagnose()


if __name__ == "__main__":
    sys.exit(main())
