"""Messages, held-out tasks and errors of both kinds of verifiers' environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import RLFlowError
from rlflow.report.metrics import Metric

HELD_OUT = 10  # every tenth task is for validation, where the environment has none of its own
METRICS = {"rubric": Metric("points", "what the environment's rubric gives, weighted", score=True)}


class VerifiersError(RLFlowError):
    """The environment did what cannot be written into one conversation, or failed: the episode is
    aborted."""


def as_message(message: Any) -> dict[str, str]:
    """A message of theirs, or a row's, for the policy's chat template. Raises VerifiersError for
    what is not text."""
    get = message.get if isinstance(message, Mapping) else lambda key: getattr(message, key, None)
    role, content = get("role"), get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part if isinstance(part, Mapping) else vars(part) for part in content]
        content = (
            "".join(part["text"] for part in parts)
            if all(part.get("type") == "text" for part in parts)
            else None
        )
    if role == "text" or not isinstance(content, str) or get("tool_calls"):
        raise VerifiersError(f"expected chat messages of text, found {str(message)[:200]}.")
    return {"role": str(role), "content": content}


def split_rows(rows: list[Any]) -> dict[str, list[Any]]:
    """Split -> rows."""
    training = [row for number, row in enumerate(rows) if number % HELD_OUT]
    return {"train": training, "val": rows[::HELD_OUT]}
