"""Command groups of plug-ins: one module per command, imported when the command is used.

A command module has `add_arguments(parser) -> None` and `run(args) -> int`; its docstring is the
command's description.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.errors import RLFlowError, as_called, described
from rlflow.storage.unread import end_quietly
from rlflow.texts import printable

FORMATTER = argparse.RawDescriptionHelpFormatter
Commands = Mapping[str, tuple[str, str]]
"""Command -> (its line in the group's help, its module)."""


def add_commands(parser: argparse.ArgumentParser, commands: Commands) -> None:
    """Adds every command to the group's parser; none of their modules is imported yet."""
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=_LazyParser)
    for name, (line, module) in commands.items():
        actions.add_parser(
            name, help=line, formatter_class=FORMATTER, allow_abbrev=False
        ).module = module


def run_group(
    prog: str,
    description: str,
    commands: Commands,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a group as a program of its own; returns the exit status: 0, or the error's after an
    error that it prints in one line."""
    return end_quietly(lambda: _run_group(prog, description, commands, arguments))


def _run_group(
    prog: str, description: str, commands: Commands, arguments: Sequence[str] | None
) -> int:
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=FORMATTER)
    add_commands(parser, commands)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except BrokenPipeError:
        raise  # `end_quietly` knows what it means
    except (RLFlowError, OSError) as problem:
        print(f"rlflow: {as_called(described(problem))}", file=sys.stderr)
        return getattr(problem, "exit_code", RLFlowError.exit_code)


def add_option(
    parser: argparse._ActionsContainer,
    flags: str,
    help: str,
    default: Any = None,
    kind: Callable[[str], Any] | None = None,
) -> None:
    """Adds `--flag PLACE`, with further names of the flag in front of the place, or a switch: a
    flag without one. kind: makes its value from text (None: the default's type)."""
    *names, place = flags.split()
    if not names:
        parser.add_argument(place, action="store_true", help=help)
        return
    if default is not None:
        help = f"{help} (default {default})"
        kind = kind or type(default)
    parser.add_argument(*names, metavar=place, type=kind or str, default=default, help=help)


def log_to_stderr() -> None:
    """What a service says while it runs: its own messages from INFO on, others' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rlflow_environments").setLevel(logging.INFO)


class _Printable(logging.Formatter):
    """Keeps control characters of whoever asks a service out of its log."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _LazyParser(argparse.ArgumentParser):
    """The parser of one command: it imports the command's module when it has to parse."""

    module = ""

    def format_help(self) -> str:
        return as_called(super().format_help())

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self.module:
            module, self.module = importlib.import_module(self.module), ""
            self.description = module.__doc__
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)
