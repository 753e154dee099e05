"""`rlflow compare`: runs held against each other."""

from __future__ import annotations

import argparse

from rlflow.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "compare",
        run,
        "hold runs against each other: scores, settings, questions won and lost",
        "Prints what tells runs apart: what looks wrong in each, first and last score with intervals, time and tokens to a\n"
        "score, the questions of the last evaluation that were won and lost with an exact sign test, and the configuration\n"
        "keys that differ. The first run is what the others are held against. Folders of `rlflow eval` serve too.",
        "examples:\n  rlflow compare runs/base runs/other\n"
        "  rlflow compare runs/a runs/b runs/c --target 0.8 --out compare.html\n",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories, two or more")
    parser.add_argument(
        "--target",
        type=float,
        metavar="SCORE",
        help="time and tokens to it (default: the best that all reached)",
    )
    parser.add_argument("--out", metavar="FILE", help="also write a page, one HTML file")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison, and writes the page that was asked for."""
    from rlflow.report.comparison import compare, comparison_text, write_comparison
    from rlflow.report.recorded import RunFiles

    comparison = compare([RunFiles.open(path) for path in args.runs], args.target)
    print(comparison_text(comparison))
    if args.out:
        write_comparison(comparison, args.out)
        print(f"\nwrote {args.out}")
    return 0
