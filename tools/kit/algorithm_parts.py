"""`rlflow algorithm list | check`: the parts that a method is made of."""

from __future__ import annotations

import argparse
import inspect

from rlflow.commands.arguments import Commands, add_actions, add_command
from rlflow.components import PARTS
from rlflow.config.loading import presets, read_assignment


def add(commands: Commands) -> None:
    """Adds the command and its actions."""
    actions = add_actions(
        commands, "algorithm", "list the parts of algorithms, check one of your own"
    )
    listing = add_command(
        actions,
        "list",
        run_list,
        "list every known part and preset",
        """
        Prints the advantages, losses, aggregates, transforms, filters and curators that a
        configuration can name, with their keywords, and the presets: whole algorithms by name
        (rlflow train --preset NAME).
        """,
        """
        rlflow algorithm list --kind loss
        rlflow algorithm list --kind preset
        """,
    )
    listing.add_argument("--kind", choices=[*PARTS, "preset"], help="only these")
    check = add_command(
        actions,
        "check",
        run_check,
        "check a part against its contract",
        """
        Gives the part a small made-up batch, turned and stretched, and reports, one line each, what
        would break a training run: shapes, masks, the order of rows, padding, micro-batches,
        extreme ratios, what it remembers.
        """,
        """
        rlflow algorithm check my_method.py:MyLoss --set clip=0.1
        rlflow algorithm check ppo_clip
        """,
    )
    known = "file.py:Name, package.module:Name, or a known name"
    check.add_argument("name", metavar="NAME", help=known)
    keyword = "a keyword of the part (YAML value)"
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=keyword)
    kind = "kind of part, where its signature does not say"
    check.add_argument("--kind", choices=list(PARTS), help=kind)


def run_list(args: argparse.Namespace) -> int:
    """Prints name, keywords and first paragraph of every part, by kind, and the presets."""
    for kind in [kind for name, kind in PARTS.items() if args.kind in (None, name)]:
        print(f"{kind.name}:")
        for name in kind.names():
            text = (inspect.getdoc(kind.resolve(name)) or "").split("\n\n")[0].replace("\n", " ")
            options = ", ".join(kind.options(name))
            print(f"  {name}{f'({options})' if options else ''}\n      {text}")
    if args.kind in (None, "preset"):
        print("preset:")
        for name, text in presets().items():
            print(f"  {name}\n      {text}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where the contract is broken."""
    from .checks.parts import check_algorithm

    keywords = dict(map(read_assignment, args.set))
    report = check_algorithm(args.name, args.kind, **keywords)
    print(report)
    return 0 if report.passed else 1
