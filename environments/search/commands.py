"""`rlflow search ...`: the commands of retrieval, and that of one's own documents."""

from __future__ import annotations

import argparse

from rlflow_environments.common.commands import FORMATTER, add_commands
from rlflow_environments.retrieval.commands import COMMANDS as RETRIEVAL

COMMANDS = {
    **{name: RETRIEVAL[name] for name in ("build", "serve", "query")},
    "qa": (
        "questions and answers from your own documents",
        "rlflow_environments.search.own_documents.command",
    ),
    "check": RETRIEVAL["check"],
}
"""Command -> (its line in the help, its module)."""


def add(commands: argparse._SubParsersAction) -> None:
    """The plug-in: adds `search` to the command line of rlflow."""
    parser = commands.add_parser(
        "search",
        help="retrieval: build, serve and try indices",
        description="Retrieval for the search environment.",
        formatter_class=FORMATTER,
        allow_abbrev=False,
    )
    add_commands(parser, COMMANDS)
