"""Conversions that are killed by SIGKILL in the middle of a change of the disk. A program of its
own, as it forks.

    python killed_conversion.py DIRECTORY-WITH-step-AND-hf PLACE KILLS SEED

Converts to PLACE/whole, then to PLACE/out00, out01, ..., each killed at a random change. Prints
{"changes": of the whole conversion, "killed_at": [...]}."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

CALLS = ("fsync", "rename", "replace", "unlink", "mkdir")


class Disk:
    """Counts the changes of the disk; at the one with number `fatal` the process is killed, with half
    of it written where it is a write."""

    def __init__(self, fatal: int) -> None:
        from rlflow_tools.ckpt_convert.writers.files import HashedFile

        self.fatal, self.seen = fatal, 0
        for name in CALLS:
            setattr(os, name, self._counting(getattr(os, name)))
        write = HashedFile.write

        def half(file: Any, data: Any) -> int:
            self.seen += 1
            if self.seen == self.fatal:
                write(file, memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, data)

        HashedFile.write = half  # type: ignore[method-assign]

    def _counting(self, real: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            self.seen += 1
            if self.seen == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return called


def convert(made: Path, out: Path, fatal: int = 0) -> tuple[int, int]:
    """(exit status, changes of the disk) of a conversion in a process of its own."""
    from rlflow_tools.ckpt_convert import stream
    from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface

    stream.BLOCK_BYTES = 4000
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        disk = Disk(fatal)
        to_huggingface(made / "step", out, made / "hf", Options(shard_bytes=100_000))
        os.writev(write, [str(disk.seen).encode()])
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(read) as stream_of_count:
        return status, int(stream_of_count.read() or 0)


def main() -> None:
    made, place = Path(sys.argv[1]), Path(sys.argv[2])
    kills, seed = int(sys.argv[3]), int(sys.argv[4])
    status, changes = convert(made, place / "whole")
    if status:
        sys.exit(f"the whole conversion ended with status {status}")
    draw = random.Random(seed)
    fatal = [draw.randint(1, changes) for _ in range(kills)]
    for number, event in enumerate(fatal):
        status, _ = convert(made, place / f"out{number:02}", event)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"change {event} of {changes}: status {status}, not killed")
    print(json.dumps({"changes": changes, "killed_at": fatal}))


if __name__ == "__main__":
    main()
