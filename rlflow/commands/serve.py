"""`rlflow serve`: processes for a run of another command, on this or another machine of its Ray
cluster."""

from __future__ import annotations

import argparse

from rlflow.commands.arguments import Commands, add_command, check_least


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "serve",
        run,
        "offer processes to a run: trainer ranks, rollout workers",
        "Offers processes to the run of that name, on this machine of its Ray cluster, until it is stopped: for trainer\n"
        "ranks or for rollout workers. The run itself, `rlflow train` with cluster.address and cluster.services, keeps\n"
        "tasks and checkpoints; it finds the processes by the name. Each of the three may be stopped and started again: a\n"
        "process that ends is offered anew, attempts of a lost worker are issued again, and a run whose trainer or driver\n"
        "is gone goes on with --resume.",
        "examples:\n  ray start --head --port=6379\n"
        "  rlflow serve trainer --cluster 127.0.0.1:6379 --run mine --processes 2 --gpus 1\n"
        "  rlflow serve rollout --cluster 127.0.0.1:6379 --run mine --processes 4 --gpus 1\n"
        "  rlflow train --config my.yaml cluster.address=127.0.0.1:6379 cluster.services=mine cluster.ranks=2 \\\n"
        "      cluster.rollout_workers=4 cluster.gpus_per_rank=1\n",
    )
    parser.add_argument("role", choices=("trainer", "rollout"))
    parser.add_argument(
        "--cluster", required=True, metavar="HOST:PORT", help="address of the Ray cluster"
    )
    parser.add_argument(
        "--run", required=True, dest="name", metavar="NAME", help="cluster.services of the run"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="how many (default 1)"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        metavar="N",
        help="number of the first one; others may be served elsewhere",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="cores of each (default 1)"
    )
    parser.add_argument(
        "--gpus", type=float, default=0.0, metavar="N", help="GPUs of each (default 0)"
    )


def run(args: argparse.Namespace) -> None:
    """Serves until a signal comes."""
    from rlflow.cluster.services import serve

    check_least(args, processes=1, threads=1, first=0, gpus=0)

    def say(text: str) -> None:
        print(text, flush=True)

    options = {
        "count": args.processes,
        "first": args.first,
        "threads": args.threads,
        "gpus": args.gpus,
    }
    serve(args.role, args.name, args.cluster, say=say, **options)
