"""The command line of rlflow, plug-ins' commands included."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata

from rlflow.commands import config, doctor, eval, merge, train
from rlflow.commands.arguments import CommandParser, Commands
from rlflow.config.keys import elsewhere
from rlflow.errors import (
    CALLED_IN,
    COMMAND_PLUG_INS,
    RLFlowError,
    as_called,
    command,
    described,
    did_you_mean,
)
from rlflow.storage.redaction import redact_text
from rlflow.storage.unread import end_quietly
from rlflow.texts import printable

CORE = {
    "train": train.add,
    "eval": eval.add,
    "merge": merge.add,
    "config": config.add,
    "doctor": doctor.add,
}
"""Name -> what adds the command."""
ORDER = (
    "train",
    "sft",
    "eval",
    "env",
    "algorithm",
    "merge",
    "show",
    "view",
    "compare",
    "ask",
    "config",
    "doctor",
)
"""Of the commands in `rlflow --help`, whoever brings them; those of other names follow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, the error's own (2, or a conversion's) with one
    line on stderr, 130 for Ctrl-C, 143 for SIGTERM. RLFLOW_DEBUG=1 shows tracebacks."""
    with _staying_here():
        return end_quietly(lambda: _main(arguments))


@contextmanager
def _staying_here() -> Iterator[None]:
    """Comes back to the folder of the call: a command may work in that of a run."""
    called_in, here = os.environ.get(CALLED_IN), None
    with suppress(OSError):  # it may have been removed
        here = os.getcwd()
    try:
        yield
    finally:
        if called_in is None:
            os.environ.pop(CALLED_IN, None)
        if here is not None:
            with suppress(OSError):
                os.chdir(here)


def _main(arguments: Sequence[str] | None) -> int:
    args = parse(arguments)
    try:
        with _warnings_on_stderr():
            return int(args.run(args) or 0)
    except RLFlowError as error:
        if os.environ.get("RLFLOW_DEBUG") == "1":
            raise
        told = printable(as_called(redact_text(str(error))))
        print(f"rlflow: {type(error).__name__}: {told}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print("rlflow: interrupted.", file=sys.stderr)
        return getattr(stop, "exit_code", 130)
    except BrokenPipeError:
        raise  # `end_quietly` knows whether it is `rlflow show RUN | head`
    except OSError as error:
        # A name that is too long, a file that may not be read: the system says which
        if os.environ.get("RLFLOW_DEBUG") == "1":
            raise
        print(f"rlflow: {redact_text(described(error))}", file=sys.stderr)
        return RLFlowError.exit_code


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Shows warnings of rlflow on stderr, and lets its information reach a run's log file."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown = f"rlflow: {printable(as_called(redact_text(self.format(record))))}"
            # Today's stderr: a live display may stand in for it
            print(_at_words(shown) if sys.stderr.isatty() else shown, file=sys.stderr)

    logger, handler = logging.getLogger("rlflow"), Handler(logging.WARNING)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _at_words(text: str) -> str:
    """The lines of a text broken between words, which a terminal does not do itself."""
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; `args.run(args)` carries it out."""
    parser = make_parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and not rest[0].startswith("-") and getattr(args, "question", "") is None:
        args.question = rest.pop(0)  # argparse gives up on it too where an option stands in front
    # argparse gives up on section.key=value words between options, which are legal
    takes = hasattr(args, "overrides")
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or not takes]
    if unknown:
        innermost = _innermost(parser, sys.argv[1:] if arguments is None else arguments)
        option = unknown[0].split("=")[0]
        hint = did_you_mean(option, _options(innermost), likeness=0.75)
        if not hint and takes:  # --learning-rate, as others have it
            hint = elsewhere(option.lstrip("-").replace("-", "_"))
        told = f"{' '.join(unknown)}; see {innermost.prog} --help.{hint}"
        innermost.error(f"unrecognized arguments: {told}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    if not hasattr(args, "run"):
        parser.print_help()
        parser.exit(0)
    return args


def _innermost(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that the words name, `rlflow env play` for one."""
    for word in words:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
    return parser


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def make_parser() -> argparse.ArgumentParser:
    """The whole command line. A plug-in's command is a function `add(subparsers) -> None`, which
    calls `parser.set_defaults(run=function of args)`."""
    parser = CommandParser(
        prog=command(),
        description="Reinforcement learning for LLM agents, trained with Megatron; everything also "
        "runs on two CPU cores.",
        epilog=f"`{command()} COMMAND --help` explains a command. RLFLOW_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"rlflow {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for add in _adders():
        add(commands)
    return parser


def _adders() -> list[Callable[[Commands], None]]:
    """What adds each command, in the order of the help."""
    plug_ins = metadata.entry_points(group=COMMAND_PLUG_INS)
    adders = {**{entry.name: entry.load() for entry in plug_ins}, **CORE}
    places = {name: place for place, name in enumerate(ORDER)}
    names = sorted(adders, key=lambda name: (places.get(name, len(ORDER)), name))
    return [adders[name] for name in names]


def _version() -> str:
    import rlflow

    return rlflow.__version__


if __name__ == "__main__":
    sys.exit(main())
