"""What the parsers of the commands share, and the options that stand for configuration keys, a
plug-in's included."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, as_called, did_you_mean
from rlflow.models.hub import is_hub_name

PLUG_INS = "rlflow.options"
"""Entry-point group of sequences of `Option`; `train --help` and `eval --help` show them in a group
of the entry's name."""
Commands = argparse._SubParsersAction


class CommandParser(argparse.ArgumentParser):
    """A parser whose help can be pasted, and which suggests the command that a misspelt one was
    meant for."""

    def format_help(self) -> str:
        return as_called(super().format_help())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint, known = did_you_mean(value, action.choices), ", ".join(action.choices)
            raise argparse.ArgumentError(
                action, f"found no command '{value}'.{hint} Known: {known}"
            )
        super()._check_value(action, value)


@dataclass(frozen=True)
class Option:
    """A command-line option that sets one configuration key to a path; nothing that it names is
    imported.

    must_exist: a path that does not is an error of this option, unless it `may_be` something else.
    commands: where it is offered."""

    flag: str
    key: str
    help: str
    metavar: str = "FILE"
    must_exist: bool = True
    commands: Sequence[str] = ("train", "eval")
    may_be: Callable[[str], bool] = lambda value: False

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.lstrip("-").replace("-", "_")


MODEL = Option(
    "--model",
    "model.path",
    "HuggingFace model directory, or a name on the hub such as Qwen/Qwen2.5-1.5B-Instruct",
    "PATH",
    commands=("train",),
    may_be=is_hub_name,
)
ENVIRONMENT = Option(
    "--env",
    "environment.name",
    "environment: an installed name, package.module:Class or file.py:Class",
    "NAME",
    must_exist=False,
)


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    help: str,
    text: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Adds a command, whose parser is returned. text: its description, epilog: examples; line
    breaks stay as they are."""
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


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the short forms of keys that the command offers, each plug-in's in a group of its own,
    and the overrides."""
    for group, options in _groups(command):
        place = parser.add_argument_group(f"{group} options") if group else parser
        for option in options:
            place.add_argument(
                option.flag, metavar=option.metavar, help=f"{option.help} ({option.key})"
            )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="override a key; the value is YAML",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the commands that let a trained model attempt tasks share."""
    reference = "config and tokenizer for a checkpoint (default: its run's model.path)"
    parser.add_argument("--hf", metavar="PATH", help=reference)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML configuration: environment and rollout sections are used",
    )
    code = "use all of the config.yaml beside the model, though others made it: the code, files and addresses that it names"
    parser.add_argument("--allow-code", action="store_true", help=code)
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )


def check_least(args: argparse.Namespace, **least: float) -> None:
    """Raises ConfigError for an option that is given and below its least value, or is no number."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name}: expected at least {bound:g}, found {value}.")


def option_overrides(args: argparse.Namespace, command: str) -> list[str]:
    """The overrides of a command line: short options first, so that an explicit section.key=value
    wins.

    Raises ConfigError for a path that does not exist.
    """
    overrides = []
    for option in (option for _, options in _groups(command) for option in options):
        value = getattr(args, option.name)
        if value is None:
            continue
        if option.must_exist and not Path(value).exists() and not option.may_be(value):
            raise ConfigError(f"{option.flag}: {value}: no such file or directory.")
        overrides.append(f"{option.key}={quoted(value)}")
    return [*overrides, *args.overrides]


def quoted(text: str) -> str:
    """The text as a YAML value, whatever it looks like."""
    return "'" + text.replace("'", "''") + "'"


def _groups(command: str) -> Iterator[tuple[str, list[Option]]]:
    """(name of the plug-in, "" for the core, its options of the command)."""
    registered = sorted(metadata.entry_points(group=PLUG_INS), key=lambda entry: entry.name)
    for name, options in [
        ("", (MODEL, ENVIRONMENT)),
        *((entry.name, entry.load()) for entry in registered),
    ]:
        offered = [option for option in options if command in option.commands]
        if offered:
            yield name, offered
