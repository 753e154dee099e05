"""Starts vLLM's own API server with the flags that fit the platform: `python -m rlflow_vllm.start
FLAGS`, where FLAGS is a JSON object of lists: `always`, `cpu`, `sleeping`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

WINDOW = "vLLM 0.32 or 0.33"


def chosen(flags: Mapping[str, Sequence[str]], on_cpu: bool, sleeps: bool) -> list[str]:
    """The flags for a platform; those in `always` come last and win."""
    cpu = flags["cpu"] if on_cpu else ()
    return [*cpu, *(flags["sleeping"] if sleeps else ()), *flags["always"]]


def main() -> None:
    """Serves until it is ended."""
    import vllm

    try:
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.platforms import current_platform
    except ImportError as error:
        found = f"vLLM {vllm.__version__} in {sys.prefix}"
        sys.exit(f"VersionError: {found} has no such server ({error}); install {WINDOW}.")
    sleeps = current_platform.is_sleep_mode_available()
    flags = chosen(json.loads(sys.argv[1]), current_platform.is_cpu(), sleeps)
    sys.argv = ["vllm serve", *flags]
    entry.main()


if __name__ == "__main__":
    main()
