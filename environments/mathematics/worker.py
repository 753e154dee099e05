"""Compares answers by math-verify: reads a JSON object per line, answers with one.

Runs apart from the training process: what a policy writes (9**9**9) may take for ever, or all
memory. A timer of the system, which counts seconds of a processor, ends this process, inside of a
long multiplication too."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    memory_mb = int(sys.argv[1])
    logging.disable(logging.CRITICAL)
    import math_verify

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody empties the pipe from here on
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    _write({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["limit_s"])
        answer = _compared(math_verify, asked["wanted"], asked["found"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def _compared(library: Any, wanted: str, found: str) -> dict[str, Any]:
    try:
        return {"same": _same(library, wanted, found, True)}
    except (MemoryError, RecursionError) as error:
        return {"failed": type(error).__name__}
    except Exception:  # noqa: BLE001 -- of one of several readings: the library goes on without it
        return {"same": _same(library, wanted, found, False)}


def _same(library: Any, wanted: str, found: str, raise_on_error: bool) -> bool:
    def parsed(text: str) -> Any:
        boxed = f"\\boxed{{{text.rstrip('.')}}}"
        return library.parse(boxed, parsing_timeout=None, raise_on_error=raise_on_error)

    options = {"timeout_seconds": None, "raise_on_error": raise_on_error}
    return bool(library.verify(parsed(wanted), parsed(found), **options))


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
