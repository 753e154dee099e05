"""Which index fits a corpus, a machine and a load.

Memory is arithmetic; queries per second are what this machine's memory bandwidth and arithmetic, measured now, allow for the
search itself (the encoder comes on top); recall is typical for text embeddings. benchmarks/retrieval.py measures all of it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

EXAMPLES = """examples:
  rlflow search advise --corpus 21015324 --dim 768 --ram 64GB --qps 50
  rlflow search advise --corpus 21015324 --dim 768 --ram 128GB --vram 80GB --qps 500
  rlflow search advise --corpus corpus.jsonl
"""
_UNITS = {"": 10**9, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The corpus, the vectors, the machine and the load."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--corpus", required=True, metavar="N", help="passages, or a corpus.jsonl whose lines are counted"
    )
    parser.add_argument("--dim", type=int, default=768, metavar="D", help="dimensions of a vector (default 768)")
    parser.add_argument(
        "--ram", metavar="SIZE", help="memory for the index, 64GB for instance (default: what is free here)"
    )
    parser.add_argument("--vram", default="0", metavar="SIZE", help="memory of the GPU for the index (default 0)")
    parser.add_argument("--qps", type=float, default=20.0, metavar="Q", help="queries per second to reach (default 20)")
    parser.add_argument(
        "--bandwidth", metavar="SIZE", help="bytes per second that the memory gives (default: measured here)"
    )
    parser.add_argument(
        "--gpu-bandwidth", default="2000GB", metavar="SIZE", help="of the GPU (default 2000GB: A100-80)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints every kind of index and the one to take; returns 0, or 1 where none fits."""
    import dataclasses
    import os

    import psutil

    from rlflow_environments.retrieval.building.advising import advise, candidates, disturbance, measure_machine
    from rlflow_environments.retrieval.indices.cost import readable

    count = count_passages(args.corpus)
    ram = parse_size(args.ram, "--ram") if args.ram else float(psutil.virtual_memory().available)
    machine = measure_machine(ram, parse_size(args.vram, "--vram"))
    disturbed = "" if args.bandwidth else disturbance(machine, os.getloadavg()[0], len(os.sched_getaffinity(0)))
    machine = dataclasses.replace(machine, gpu_bandwidth=parse_size(args.gpu_bandwidth, "--gpu-bandwidth"))
    if args.bandwidth:
        machine = dataclasses.replace(machine, cpu_bandwidth=parse_size(args.bandwidth, "--bandwidth"))
    print(
        f"{count:,} passages x {args.dim} dimensions; memory {readable(ram)}, {readable(machine.cpu_bandwidth)}/s, "
        f"{machine.cpu_arithmetic / 1e9:.0f} GFLOP/s\n"
    )
    if disturbed:
        print(
            f"WARNING: this machine was busy while it was measured ({disturbed}). What follows is too low: repeat it "
            "when nothing else runs, or give --bandwidth.\n"
        )
    found = candidates(count, args.dim, machine)
    print(f"{'index':28}{'memory':>10}{'recall@10':>11}{'q/s alone':>12}{'q/s of 64':>12}  fits")
    for option in found:
        print(
            f"{option.label:28}{readable(option.memory):>10}{option.recall:>11.2f}"
            f"{option.qps_alone:>12.3g}{option.qps_batched:>12.3g}  {'yes' if option.fits else 'no'}"
        )
    chosen = advise(found, args.qps)
    if chosen is None:
        smallest = readable(min(option.memory for option in found))
        print(f"\nNone fits. The smallest needs {smallest}: use several machines, or fewer passages.")
        return 1
    slow = chosen.qps_batched < args.qps
    reached = f" (none that fits reaches {args.qps:g} queries/s; this is the fastest)" if slow else ""
    print(f"\ntake {chosen.label}{reached}:")
    print(f"  rlflow search build --corpus corpus.jsonl --encoder MODEL --index {chosen.build} --out index")
    print(f"  retriever: {chosen.retriever[:-1]}, path: index}}")
    return 0


def count_passages(text: str) -> int:
    """A number as it stands (1e6, 21015324, 21M), or the lines of a file. Raises ConfigError."""
    from rlflow.errors import ConfigError

    if found := re.fullmatch(r"([\d_.]+(?:e\d+)?)([kM]?)", text):
        number = round(float(found[1]) * {"": 1, "k": 10**3, "M": 10**6}[found[2]])
        if number > 0:
            return number
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"--corpus: expected a number of passages (21015324, 21M) or a file, found '{text}'.")
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def parse_size(text: str, option: str) -> float:
    """Bytes of `64GB`, `1.5TB`, `80` (gigabytes). Raises ConfigError."""
    from rlflow.errors import ConfigError

    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*?)(?:/s)?", text.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ConfigError(f"{option}: expected a size such as 64GB, found '{text}'.")
    return float(found[1]) * _UNITS[found[2].upper()]
