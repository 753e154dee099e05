"""Options and output that the converter's commands share."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {
    "tp": ("tensor_parallel", "tensor-parallel ranks"),
    "pp": ("pipeline_parallel", "pipeline stages"),
    "ep": ("expert_parallel", "expert-parallel ranks"),
    "vpp": ("virtual_pipeline_parallel", "virtual pipeline stages per rank"),
    "iteration": ("iteration", "training step; chooses its checkpoint where CKPT holds several"),
    "num-layers": ("layers", "layers"),
    "hidden-size": ("hidden", "hidden size"),
    "num-attention-heads": ("heads", "attention heads"),
    "num-query-groups": ("groups", "key-value heads"),
    "ffn-hidden-size": ("ffn", "intermediate size"),
    "vocab-size": ("vocab", "vocabulary without padding"),
}
"""Options by name: field of the checkpoint or of Architecture, and what it is."""


FORMATTER = argparse.RawDescriptionHelpFormatter


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of `4GB`, `500MB`, `2GiB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, found '{text}'")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))


def parse_count(text: str) -> int:
    """A whole number from 1 to 64."""
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 64, found '{text}'")
    return int(text)


def add_writing_options(parser: argparse.ArgumentParser, shards: str) -> None:
    """Adds what both directions take; shards: what --shard-size is of."""
    parser.add_argument("--dtype", choices=("keep", "bf16", "fp16", "fp32"), default="keep", help="default: keep")
    parser.add_argument("--shard-size", type=parse_size, default=4 * 10**9, metavar="SIZE", help=shards)
    parser.add_argument("--workers", type=parse_count, default=4, metavar="N", help="files written at a time (default 4)")
    checks = ("fast", "full", "logits", "none")
    parser.add_argument("--verify", choices=checks, default="fast", help="default: fast; see below")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT once the new one is verified")
    parser.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def writing_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords that `add_writing_options` is about."""
    names = ("dtype", "workers", "overwrite", "verify")
    return {name: getattr(args, name) for name in names} | {"shard_bytes": args.shard_size}


def timed(convert: Callable[[Meter], dict[str, Any]]) -> dict[str, Any]:
    """What a conversion, which is given a meter, says of itself, and what it took: `seconds`, `peak_rss_mib`."""
    start = time.monotonic()
    report = convert(Meter(sys.stderr.isatty()))
    return {**report, "seconds": round(time.monotonic() - start, 3), "peak_rss_mib": peak_rss_mib()}


def peak_rss_mib() -> int | None:
    """The most resident memory that this process had, MiB; None where Linux' /proc is not there."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) // 1024 if found else None


def logits_check(verify: str, checkpoint: Path | None, model: Path | None, dtype: str) -> Callable[[Path], None] | None:
    """With `--verify logits` the check of a conversion's result: a model directory made of `checkpoint`, or a checkpoint made
    of `model`."""

    def check(result: Path) -> None:
        from .oracle.logits import check_logits  # imports torch

        check_logits(checkpoint or result, model or result, dtype)

    return check if verify == "logits" else None


class Meter:
    """Progress on stderr: share done, GB/s, and seconds left. One line on a terminal, else a line every half minute."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._done = 0
        self._found: int | None = None
        self._start = self._shown = time.monotonic()

    def __call__(self, count: int, total: int) -> None:
        """count: bytes that were written since the last call; in the first call, those that were there before."""
        self._found = count if self._found is None else self._found
        self._done += count
        now = time.monotonic()
        finished = self._done >= total
        if now - self._shown < (0.2 if self._terminal else 30) and not (finished and self._terminal):
            return
        self._shown = now
        rate = (self._done - self._found) / max(now - self._start, 1e-6)
        left = (total - self._done) / max(rate, 1.0)
        text = f"{100 * self._done / total:3.0f}%  {self._done / 1e9:.2f} GB  {rate / 1e9:.2f} GB/s  {left:.0f} s left"
        if self._terminal:
            print(f"\r{text} ", end="\n" if finished else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
