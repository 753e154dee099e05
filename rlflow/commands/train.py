"""`rlflow train`: a training run from a configuration."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from rlflow.commands.arguments import Commands, add_command, add_options, option_overrides
from rlflow.errors import ConfigError


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "train",
        run,
        "train a policy",
        "Trains the policy that a configuration describes: rollouts, rewards, Megatron updates, weight sync,\n"
        "evaluation, checkpoints, and at the end a HuggingFace export. Keys and defaults: docs/configuration.md.",
        "examples:\n"
        "  rlflow train --config my.yaml\n"
        "  rlflow train --config my.yaml run.steps=20 trainer.lr=1e-4 algorithm.losses.0.clip_high=0.28\n"
        "  rlflow train --config my.yaml --preset NAME\n"
        "  rlflow train --model DIR --env my_task.py:MyTask environment.highest=99 --dry-run\n"
        "  rlflow train --config my.yaml --resume\n"
        "  rlflow train --config THEIRS.yaml --out mine.yaml      # another system's: says what became of each key\n",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML configuration; a relative `base:` in it is read first",
    )
    out = "where ours goes if --config is of another system (default: beside the run's directory)"
    parser.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="a named algorithm in place of the file's (rlflow algorithm list)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run from its last checkpoint"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="throw away the files of an earlier run of that name",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="open all that the run needs, print configuration, plan, memory and "
        "every problem, and exit",
    )
    add_options(parser, "train")


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0, or 128 + the signal's number for a run that a signal ended."""
    from rlflow.config.checks import check_config
    from rlflow.config.foreign import foreign_table
    from rlflow.config.schema import load_config

    table = foreign_table(args.config) if args.config else None
    if table is not None:
        return _translated(args, table)
    if args.out:
        raise ConfigError(
            "--out: only for a --config of another system, whose translation goes there."
        )
    config = load_config(args.config, train_overrides(args), args.preset)
    if args.dry_run:
        from rlflow.commands.dry_run import dry_run

        return dry_run(config)
    check_config(config)
    from rlflow.loop import train

    status = train(config)["status"]
    return next(
        (
            128 + number
            for number in (signal.SIGINT, signal.SIGTERM)
            if status.endswith(number.name)
        ),
        0,
    )


def _translated(args: argparse.Namespace, table: dict[str, Any]) -> int:
    """Translates the configuration of another system, and writes ours without --dry-run."""
    from rlflow.commands.dry_run import dry_run
    from rlflow.commands.translate import report, write
    from rlflow.config.foreign import translate

    if args.preset:
        raise ConfigError(
            f"--preset: {args.config} is of {table['system']}; give it with the file that this command writes."
        )
    translation = translate(args.config, table, option_overrides(args, "train"))
    report(args.config, translation)
    if args.dry_run:
        return dry_run(translation.config)
    write(args.config, translation, args.out, args.overwrite)
    return 0


def train_overrides(args: argparse.Namespace) -> list[str]:
    """The overrides of a train command line, the weakest first."""
    switches = [f"run.{name}=true" for name in ("resume", "overwrite") if getattr(args, name)]
    # The config.yaml of a run that began with the one must not forbid the other
    if len(switches) == 1:
        switches.insert(0, "run.overwrite=false" if args.resume else "run.resume=false")
    return [*switches, *option_overrides(args, "train")]
