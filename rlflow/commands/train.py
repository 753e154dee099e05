"""`rlflow train`: a training run from a configuration."""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.commands.arguments import (
    Commands,
    add_command,
    add_options,
    flag,
    option,
    option_overrides,
)
from rlflow.errors import ConfigError

if TYPE_CHECKING:
    from rlflow.config.foreign import ForeignFile

logger = logging.getLogger(__name__)


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "train",
        run,
        "train a policy",
        """
        Trains the policy that a configuration describes: rollouts, rewards, Megatron updates,
        weight sync, evaluation, checkpoints, and at the end a HuggingFace export. Keys and
        defaults: docs/configuration.md. A --config of another system is translated: the command
        says what became of each key.
        """,
        """
        rlflow train --config my.yaml
        rlflow train --config my.yaml run.steps=20 trainer.lr=1e-4 algorithm.losses.0.clip_high=0.28
        rlflow train --config my.yaml --preset NAME
        rlflow train --model DIR --env my_task.py:MyTask environment.highest=99 --dry-run
        rlflow train --config my.yaml --resume
        rlflow train --config THEIRS.yaml --out mine.yaml
        """,
    )
    given = "YAML configuration; a relative `base:` in it is read first"
    option(parser, "--config", "FILE", given)
    out = "where ours goes if --config is of another system (default: beside the run's directory)"
    option(parser, "--out", "FILE", out)
    preset = "a named algorithm in place of the file's (rlflow algorithm list)"
    option(parser, "--preset", "NAME", preset)
    flag(parser, "--resume", "continue the run from its last checkpoint")
    flag(parser, "--overwrite", "throw away the files of an earlier run of that name")
    dry = "open all that the run needs, print configuration, plan, memory and every problem"
    flag(parser, "--dry-run", f"{dry}, and exit")
    flag(parser, "--model-later", "with --dry-run: model.path is made later; look at all else")
    add_options(parser, "train")


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0, or 128 + the signal's number for a run that a signal ended."""
    from rlflow.config.checks import check_config
    from rlflow.config.foreign import foreign_file
    from rlflow.preflight.host_memory import sized_config
    from rlflow.run.places import enter_project

    theirs = foreign_file(args.config) if args.config else None
    if theirs is not None:
        return _translated(args, theirs)
    if args.out:
        raise ConfigError("--out: only for a --config of another system, for its translation.")
    overrides, here = train_overrides(args), Path.cwd()
    if args.config:
        file = Path(args.config).absolute()
        overrides = enter_project(file, overrides, args.resume)
        args.config = file if Path.cwd() != here else args.config
    config, note = sized_config(args.config, overrides, args.preset)
    if args.model_later and not args.dry_run:
        raise ConfigError("--model-later: only with --dry-run, as a run needs its model.")
    if args.dry_run:
        from rlflow.commands.dry_run import dry_run

        return dry_run(config, args.model_later, note)
    check_config(config)
    if note:
        logger.warning("%s", note)
    from rlflow.loop import train

    status = train(config)["status"]
    ended_by = [one for one in (signal.SIGINT, signal.SIGTERM) if status.endswith(one.name)]
    return 128 + ended_by[0] if ended_by else 0


def _translated(args: argparse.Namespace, theirs: ForeignFile) -> int:
    """Translates the configuration of another system, and writes ours without --dry-run."""
    from rlflow.commands.dry_run import dry_run
    from rlflow.commands.translate import report, write

    if args.preset:
        advice = "give it with the file that this command writes"
        raise ConfigError(f"--preset: {args.config} is of {theirs.system}; {advice}.")
    translation = theirs.translate(option_overrides(args, "train"))
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
    return [*switches, *option_overrides(args, args.command)]
