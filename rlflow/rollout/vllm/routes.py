"""Routes of a server that takes and gives JSON, asked from an event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rlflow.errors import MissingPackageError
from rlflow.http import Retryable, check_status
from rlflow.rollout.vllm.backend import CALL_S

CONNECT_S = 10.0
EXCERPT = 300  # characters of an answer that an error tells
BESIDE = 8  # connections for what goes past the requests that run: pauses, aborts


class Refused(Exception):
    """An answer that no repetition would change."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")


class Routes:
    """Those of the server at a URL. key: sent as a bearer token. connections: requests that run at a time. Raises
    MissingPackageError."""

    def __init__(self, url: str, key: str | None, connections: int) -> None:
        try:
            import aiohttp
        except ImportError:
            raise MissingPackageError("rollout.engine.url needs the package aiohttp: pip install aiohttp") from None
        self.url = url.rstrip("/").removesuffix("/v1")
        self.heard = time.monotonic()
        """When the server last answered."""
        self._aiohttp, self._key, self._connections = aiohttp, key, connections
        self._session: Any = None

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = CALL_S,
        missing: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that a route answers, {} where it answers none. missing: what a route that is not there stands for.
        limit_s: none: as long as the server computes. Raises Retryable where nobody answered, Refused for a status that says
        no."""
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connector = self._aiohttp.TCPConnector(limit=self._connections + BESIDE)
            self._session = self._aiohttp.ClientSession(headers=headers, connector=connector)
        timeout = self._aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
        except (self._aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Retryable(f"{type(error).__name__} {error}".rstrip()) from None
        self.heard = time.monotonic()
        if response.status == 404 and missing is not None:
            return missing
        excerpt = " ".join(text.split())[:EXCERPT]
        check_status("", response.status, response.headers, excerpt)
        if response.status != 200:
            raise Refused(response.status, excerpt)
        try:
            found = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise Refused(200, f"expected JSON, found {excerpt}") from None
        return found if isinstance(found, dict) else {"": found}

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()
