"""Parsers of the commands, and options that stand for configuration keys, a plug-in's included."""

from __future__ import annotations

import argparse
import inspect
import textwrap
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
    """A parser whose help can be pasted, and which corrects misspelt commands."""

    def format_help(self) -> str:
        return as_called(super().format_help())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint, known = did_you_mean(value, action.choices), ", ".join(action.choices)
            told = f"found no command '{value}'.{hint} Known: {known}"
            raise argparse.ArgumentError(action, told)
        super()._check_value(action, value)


@dataclass(frozen=True)
class Option:
    """A command-line option that sets one configuration key to a path, which is not imported.

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
    commands=("train", "sft"),
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
    """Adds a command, whose parser is returned. text: its description, epilog: its examples, both
    with their line breaks."""
    parser = commands.add_parser(
        name,
        help=help,
        description=inspect.cleandoc(text),
        epilog=f"examples:\n{textwrap.indent(inspect.cleandoc(epilog), '  ')}" if epilog else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_actions(commands: Commands, name: str, help: str) -> Commands:
    """Adds a command that consists of actions, to which these are added."""
    parser = commands.add_parser(name, help=help)
    parser.set_defaults(run=lambda args: parser.print_help())
    return parser.add_subparsers(title="actions", metavar="ACTION")


def flag(parser: argparse._ActionsContainer, name: str, help: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(name, action="store_true", help=help)


def option(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    help: str,
    default: Any = None,
    **more: Any,
) -> None:
    """Adds an option with a value, of the type of its default, which the help gives."""
    if default is not None:
        more, help = {"type": type(default), **more}, f"{help} (default {default})"
    parser.add_argument(name, metavar=metavar, help=help, default=default, **more)


def add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the command's short forms of keys, each plug-in's in a group, and the overrides."""
    for group, offered in _groups(command):
        place = parser.add_argument_group(f"{group} options") if group else parser
        for option in offered:
            told = f"{option.help} ({option.key})"
            place.add_argument(option.flag, metavar=option.metavar, help=told)
    add_overrides(parser)


def add_overrides(
    parser: argparse.ArgumentParser,
    metavar: str = "section.key=value",
    help: str = "override a key; the value is YAML",
) -> None:
    """Adds the words that set keys."""
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=help)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that let a trained model attempt tasks."""
    reference = "config and tokenizer for a checkpoint (default: its run's model.path)"
    option(parser, "--hf", "PATH", reference)
    sections = "YAML configuration: environment and rollout sections are used"
    option(parser, "--config", "FILE", sections)
    code = "use all of the config.yaml beside the model, though others made it"
    flag(parser, "--allow-code", f"{code}: the code, files and addresses that it names")


def check_least(args: argparse.Namespace, **least: float) -> None:
    """Raises ConfigError for an option that is given and below its least value, or is no number."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name}: expected at least {bound:g}, found {value}.")


def check_no_folder(out: Path) -> None:
    """Raises ConfigError where --out names a folder and not a file."""
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a directory; expected a file, as {out / 'page.html'}.")


def option_overrides(args: argparse.Namespace, command: str) -> list[str]:
    """The overrides of a command line: short options first, so that section.key=value wins.

    Raises ConfigError for the paths that do not exist, all of them."""
    overrides, missing = [], []
    for option in (option for _, options in _groups(command) for option in options):
        value = getattr(args, option.name)
        if value is None:
            continue
        if option.must_exist and not Path(value).exists() and not option.may_be(value):
            missing.append(f"{option.flag}: {value}: no such file or directory.")
        overrides.append(f"{option.key}={quoted(value)}")
    if missing:
        raise ConfigError(" ".join(missing))
    return [*overrides, *args.overrides]


def quoted(text: str) -> str:
    """The text as a YAML value, whatever it looks like."""
    return "'" + text.replace("'", "''") + "'"


def _groups(command: str) -> Iterator[tuple[str, list[Option]]]:
    """(name of the plug-in, "" for the core, its options of the command)."""
    registered = sorted(metadata.entry_points(group=PLUG_INS), key=lambda entry: entry.name)
    groups = [
        ("", (MODEL, ENVIRONMENT)),
        *((entry.name, entry.load()) for entry in registered),
    ]
    for name, options in groups:
        offered = [option for option in options if command in option.commands]
        if offered:
            yield name, offered
