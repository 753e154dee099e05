"""`rlflow search ...`: one module per command, imported when the command is used.

A command module has `add_arguments(parser) -> None` and `run(args) -> int`; the first line of its docstring is its help.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import Any

COMMANDS = {
    "build": "corpus -> index: resumable, works for corpora larger than memory",
    "advise": "which index fits a corpus, a machine and a load",
    "serve": "serve an index over HTTP, wire-compatible with the field",
    "query": "try an index or a server in the terminal",
    "data": "what a file of questions or passages is; write it in one form",
    "qa": "questions and answers from your own documents",
    "check": "test any retrieval server against the wire format",
}
"""Command -> its line in `rlflow search --help`. The code of `name` is in `commands/name.py`."""

FORMATTER = argparse.RawDescriptionHelpFormatter


def add(commands: argparse._SubParsersAction) -> None:
    """The plug-in: adds `search` to the command line of rlflow."""
    parser = commands.add_parser(
        "search",
        help="retrieval: build, serve and try indices",
        description="Retrieval for the search environment.",
        formatter_class=FORMATTER,
        allow_abbrev=False,
    )
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds every command; none of their modules is imported yet."""
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=_LazyParser)
    for name, line in COMMANDS.items():
        actions.add_parser(name, help=line, formatter_class=FORMATTER, allow_abbrev=False)


class _LazyParser(argparse.ArgumentParser):
    """The parser of one command: it imports the command's module when it has to parse."""

    _loaded = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        if not self._loaded:
            self._loaded = True
            module = _module(self.prog.split()[-1])
            self.description = module.__doc__
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
