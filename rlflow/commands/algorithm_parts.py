"""`rlflow algorithm list | check`: the parts that a method is made of."""

from __future__ import annotations

import argparse
import inspect

from rlflow.commands.arguments import Commands, add_command
from rlflow.components import PARTS
from rlflow.config.loading import presets, read_assignment


def add(commands: Commands) -> None:
    """Adds the command and its actions."""
    parser = commands.add_parser(
        "algorithm", help="list the parts of algorithms, check one of your own"
    )
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = add_command(
        actions,
        "list",
        run_list,
        "list every known part and preset",
        "Prints the advantages, losses, aggregates, transforms, filters and curators that a configuration can name, with\n"
        "their keywords, and the presets: whole algorithms by name (rlflow train --preset NAME).",
        "examples:\n  rlflow algorithm list --kind loss\n  rlflow algorithm list --kind preset\n",
    )
    check = add_command(
        actions,
        "check",
        run_check,
        "check a part against its contract",
        "Gives the part a small made-up batch, turned and stretched, and reports, one line each, what would break a\n"
        "training run: shapes, masks, the order of rows, padding, micro-batches, extreme ratios, what it remembers.",
        "examples:\n  rlflow algorithm check my_method.py:MyLoss --set clip=0.1\n  rlflow algorithm check ppo_clip\n",
    )
    check.add_argument(
        "name", metavar="NAME", help="file.py:Name, package.module:Name, or a known name"
    )
    check.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of the part (YAML value)",
    )
    check.add_argument(
        "--kind", choices=list(PARTS), help="kind of part, where its signature does not say"
    )
    listing.add_argument("--kind", choices=[*PARTS, "preset"], help="only these")


def run_list(args: argparse.Namespace) -> int:
    """Prints name, keywords and first paragraph of every part, by kind, and the presets."""
    for kind in [kind for name, kind in PARTS.items() if args.kind in (None, name)]:
        print(f"{kind.name}:")
        for name in kind.names():
            text = (inspect.getdoc(kind.resolve(name)) or "").split("\n\n")[0].replace("\n", " ")
            options = kind.options(name)
            print(f"  {name}{'(' + ', '.join(options) + ')' if options else ''}\n      {text}")
    if args.kind in (None, "preset"):
        print("preset:")
        for name, text in presets().items():
            print(f"  {name}\n      {text}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where the contract is broken."""
    from rlflow.checks.parts import check_algorithm

    report = check_algorithm(
        args.name, args.kind, **dict(read_assignment(pair) for pair in args.set)
    )
    print(report)
    return 0 if report.passed else 1
