"""The id that leads from a search of a trajectory to the line of the server's log."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TRACE_HEADER = "X-Trace-Id"
DEADLINE_HEADER = "X-Deadline-S"
"""How long the client waits for an answer, in seconds: the server does not search for one that
nobody waits for."""


def trace_id(task_id: str, responses: Sequence[str]) -> str:
    """The id of the search that the last response asks for: 16 hex digits of the task and of what
    the policy wrote so far.

    It is a function of the recorded trajectory, so it needs no place in it: that of turn n is
    `trace_id(trajectory.task_id, [turn.response for turn in trajectory.turns[: n + 1]])`.
    """
    digest = hashlib.blake2b(digest_size=8)
    for text in (task_id, *responses):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
