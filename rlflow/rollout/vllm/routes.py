"""Routes of a server that takes and gives JSON, asked from an event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlflow.net.http import Session

GENERATE = "/inference/v1/generate"
CALL_S = 600.0
"""Of a call that is no generation: a step is waited for, and a bucket of weights loaded."""
EXCERPT = 300  # characters of an answer that an error tells


class Refused(Exception):
    """An answer that no repetition would change."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")


class Routes:
    """Those of the server at a URL, over a session's connections."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.heard = time.monotonic()
        """When the server last answered."""
        self._session = session

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = CALL_S,
        missing: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that a route answers, {} where it answers none. missing: what a route
        that is not there stands for. limit_s: none: as long as the server computes.

        Raises Retryable where nobody answered, Refused for a status that says no."""
        reply = await self._session.ask(method, self.url + path, body, timeout_s=limit_s)
        self.heard = time.monotonic()
        if reply.status == 404 and missing is not None:
            return missing
        excerpt = " ".join(reply.text.split())[:EXCERPT]
        if reply.checked().status != 200:
            raise Refused(reply.status, excerpt)
        try:
            found = reply.json() if reply.text.strip() else {}
        except (ValueError, RecursionError):
            raise Refused(200, f"expected JSON, found {excerpt}") from None
        return found if isinstance(found, dict) else {"": found}
