"""A retrieval server that fails as it is told, and clients of it."""

from __future__ import annotations

import asyncio
import json
import time

from rlflow_environments.retrieval.client.client import HttpRetriever

OK = 200
HANG = "hang"
CUT = "cut"  # closes the connection in the middle of the answer


class Scripted:
    """A server whose n-th search is answered as told; afterwards with passages that name the query and the server."""

    def __init__(
        self, *script, name="s", headers=(), identity="index-1", body=b"", loading=0
    ) -> None:
        """loading: so many times it says that it is not ready."""
        self.script = list(script)
        self.name, self.headers, self.identity, self.body = name, list(headers), identity, body
        self.loading = loading
        self.requests: list[tuple[float, dict, dict]] = []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive()).get("body", b"")
        if scope["path"] == "/ready":
            self.loading -= 1
            await self._send(send, OK if self.loading < 0 else 503, b"{}")
        elif scope["path"] == "/info":
            await self._send(
                send, OK if self.identity else 404, json.dumps({"identity": self.identity}).encode()
            )
        else:
            headers = {key.decode(): value.decode() for key, value in scope["headers"]}
            self.requests.append((time.monotonic(), json.loads(body), headers))
            await self._search(send, json.loads(body), self.script.pop(0) if self.script else OK)

    async def _search(self, send, request, step) -> None:
        if step == HANG:
            await asyncio.sleep(30)
        result = [
            [
                {
                    "document": {"id": f"{self.name}/{query}", "contents": f'"{query}"\ntext'},
                    "score": 0.5,
                }
            ]
            * request["topk"]
            for query in request["queries"]
        ]
        body = self.body or json.dumps({"result": result}).encode()
        if step == CUT:
            await self._send(send, OK, body, missing=10)
        else:
            await self._send(send, step, body, self.headers)

    async def _send(self, send, status, body, headers=(), missing=0) -> None:
        headers = [(b"content-length", str(len(body) + missing).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def client(urls, **options) -> HttpRetriever:
    return HttpRetriever(urls, **{"timeout_s": 20.0, "attempt_timeout_s": 5.0, **options})
