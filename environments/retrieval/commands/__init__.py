"""The commands of retrieval: `python -m rlflow_environments.retrieval ...`, and part of `rlflow
search ...`."""

COMMANDS = {
    "build": (
        "corpus -> index: resumable, works for corpora larger than memory",
        f"{__name__}.build",
    ),
    "serve": ("serve an index over HTTP, wire-compatible with the field", f"{__name__}.serve"),
    "query": ("try an index or a server in the terminal", f"{__name__}.query"),
    "check": ("check that an index is what was built", f"{__name__}.check"),
}
"""Command -> (its line in the help, its module)."""
