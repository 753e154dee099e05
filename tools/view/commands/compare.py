"""`rlflow compare`: runs held against each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlflow.commands.arguments import Commands, add_command, check_no_folder, option


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "compare",
        run,
        "hold runs against each other: scores, settings, questions won and lost",
        """
        Prints what tells runs apart: what looks wrong in each, first and last score with intervals,
        time and tokens to a score, the questions of the last evaluation that were won and lost with
        an exact sign test, and the configuration keys that differ. The first run is what the others
        are held against. Folders of `rlflow eval` serve too.
        """,
        """
        rlflow compare runs/base runs/other
        rlflow compare runs/a runs/b runs/c --target 0.8 --out compare.html
        """,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories, two or more")
    target = "time and tokens to it (default: the best that all reached)"
    option(parser, "--target", "SCORE", target, type=float)
    option(parser, "--out", "FILE", "also write a page, one HTML file")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison, and writes the page that was asked for."""
    from ..comparison import compare, comparison_text, write_comparison
    from ..recorded import RunFiles

    if args.out:
        check_no_folder(Path(args.out))
    comparison = compare([RunFiles.open(path) for path in args.runs], args.target)
    print(comparison_text(comparison))
    if args.out:
        write_comparison(comparison, args.out)
        print(f"\nwrote {args.out}")
    return 0
