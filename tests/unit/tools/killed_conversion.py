"""Conversions that are killed by SIGKILL in the middle of a call that changes the disk. A program of its own, as it forks.

    python killed_conversion.py DIRECTORY-WITH-step-AND-hf PLACE KILLS SEED

Converts to PLACE/whole, then to PLACE/out00, out01, ..., each killed at a random call; KILLS=0 kills one halfway. Prints
{"calls": of the whole conversion, "killed_at": [...]}."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4000
CALLS = ("write", "pwrite", "fsync", "rename", "posix_fallocate", "unlink", "mkdir")


class Disk:
    """Counts the calls that change the disk; in the one with number `fatal` half of it is done and the process killed."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.seen = 0
        for name in CALLS:
            setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name: str, real: Any) -> Any:
        def called(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen == self.fatal:
                if name in ("write", "pwrite"):
                    data = memoryview(arguments[1]).cast("B")
                    real(arguments[0], data[: len(data) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return called


def convert(made: Path, out: Path, fatal: int = 0) -> tuple[int, int]:
    """(exit status, calls that change the disk) of a conversion in a process of its own."""
    from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
    from rlflow_tools.ckpt_convert.writers import output_files

    output_files.BLOCK_BYTES = BLOCK_BYTES
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        disk = Disk(fatal)
        to_huggingface(made / "step", out, made / "hf", Options(resume=True, shard_bytes=100_000))
        os.writev(write, [str(disk.seen).encode()])
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(read) as stream:
        return status, int(stream.read() or 0)


def main() -> None:
    made, place, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    status, calls = convert(made, place / "whole")
    if status:
        sys.exit(f"the whole conversion ended with status {status}")
    draw = random.Random(seed)
    fatal = [draw.randint(1, calls) for _ in range(kills)] or [calls // 2]
    for number, event in enumerate(fatal):
        status, _ = convert(made, place / f"out{number:02}", event)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"call {event} of {calls}: status {status}, not killed")
    print(json.dumps({"calls": calls, "killed_at": fatal}))


if __name__ == "__main__":
    main()
