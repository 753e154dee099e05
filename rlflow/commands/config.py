"""`rlflow config`: the configuration keys, by a word of their name or meaning."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlflow.commands.arguments import Commands, add_command
from rlflow.errors import ConfigError, RLFlowError

if TYPE_CHECKING:
    from rlflow.config.keys import Key


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "config",
        run,
        "list the configuration keys, or those of a word",
        """
        Lists every key that a YAML file or an override can set, with its default, type and meaning.
        WORD keeps the keys that hold it in name, meaning, choices or options; other libraries'
        names (learning_rate, num_generations) are known too.
        """,
        """
        rlflow config
        rlflow config tokens
        rlflow config learning_rate
        """,
    )
    parser.add_argument("word", nargs="?", default="", metavar="WORD")


def run(args: argparse.Namespace) -> int:
    """Prints the keys. Raises ConfigError where none holds the word."""
    from rlflow.config.keys import described_keys
    from rlflow.config.schema import RunConfig

    word, count = args.word.lower(), 0
    for key in described_keys(RunConfig):
        options = _options(key, word) if word else []
        text = " ".join((key.name, key.meaning, key.type, *key.others_names, *options)).lower()
        if word in text:
            count += 1
            print("\n".join(_lines(key, options)))
    if not count:
        raise ConfigError(f"config: no key holds '{args.word}'; `rlflow config` lists them all.")
    return 0


def _lines(key: Key, options: list[str]) -> list[str]:
    """The key as an override with its default, then what it means and takes."""
    default = documented(key.default)
    if key.kind is None:
        told = [key.meaning, key.type]
    else:
        told = [key.meaning, f"one of: {', '.join(key.kind.names())}", *options]
    if key.others_names:
        told.append(f"elsewhere: {', '.join(key.others_names)}")
    width = min(shutil.get_terminal_size().columns, 120) - 4
    text = textwrap.fill("; ".join(filter(None, told)), width, break_on_hyphens=False)
    return [f"{key.name}={default}", textwrap.indent(text, "    ")]


def documented(value: Any) -> str:
    """A default as YAML in one line."""
    text = json.dumps(value)
    return text if value == "" else text.replace('"', "")


def _options(key: Key, word: str) -> list[str]:
    """The components' options that hold the word, as `ppo_clip: clip_low`."""
    found: list[str] = []
    if key.kind is None:
        return found
    for name in key.kind.names():
        with suppress(RLFlowError):  # one whose package is not installed
            held = [option for option in key.kind.options(name) if word in option.lower()]
            found += [f"{name}: {', '.join(held)}"] if held else []
    return found
