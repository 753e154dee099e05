"""`rlflow view`: a run's episodes as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlflow.commands.arguments import Commands, add_command, check_no_folder, flag, option
from rlflow.texts import printable


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "view",
        run,
        "look at every episode of a run, token by token, in a browser",
        """
        Writes one HTML file with the episodes of a run: groups with their rewards and advantages,
        turns, the tokens with log-prob, entropy, engine-trainer gap and advantage, first and last
        evaluation side by side. The file needs no server and no network. RUN is a run directory,
        the folder of an evaluation, or a .jsonl of episodes.
        """,
        """
        rlflow view runs/my-run --open
        rlflow view runs/eval-my-run --out eval.html
        """,
    )
    parser.add_argument("path", metavar="RUN")
    place = "the page (default: view.html in RUN, or beside the .jsonl)"
    option(parser, "--out", "FILE", place)
    flag(parser, "--open", "open it in the browser")


def run(args: argparse.Namespace) -> int:
    """Writes the page; prints what is on it and what looks wrong with the run."""
    from ..page import write_page
    from ..recorded import RunFiles

    recorded = RunFiles.open(args.path)
    folder = recorded.path.parent if recorded.path.is_file() else recorded.path
    out = Path(args.out) if args.out else folder / "view.html"
    check_no_folder(out)
    content, found = write_page(recorded, out)
    print(content.holds)
    for finding in found:
        print(printable(f"! {finding.title}: {finding.text}"))
    advice = "" if args.open else "; open it in a browser, or add --open"
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB){advice}")
    if args.open:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
    return 0
