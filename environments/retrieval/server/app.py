"""The HTTP face of a SearchService, as a plain ASGI application.

Rollouts call it thousands of times per step: a web framework would cost more than the search
itself."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from rlflow.errors import RLFlowError
from rlflow_environments.retrieval.client.asynchronous import (
    DEADLINE_HEADER,
    INDEX_HEADER,
    TRACE_HEADER,
)
from rlflow_environments.retrieval.records import dump_json
from rlflow_environments.retrieval.server import wire
from rlflow_environments.retrieval.server.service import SearchService

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Lifespan = Callable[["SearchApp", Receive, Send], Awaitable[None]]
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers, body."""
Given = Mapping[bytes, bytes]
Handler = Callable[[bytes, Given], Awaitable[Answer]]
"""(body, headers) of a request -> the answer."""

STATUS_PAGE = Path(__file__).with_name("status.html")
SEARCHES = ("/retrieve", "/access")
"""What is counted by status."""

MAX_BODY_BYTES = 64 << 20
_JSON = (b"content-type", b"application/json")
_TOKEN_NEEDED = (
    "expected 'Authorization: Bearer TOKEN'; the server's first line says which file holds its "
    "token."
)
_TRACE, _DEADLINE = TRACE_HEADER.lower().encode(), DEADLINE_HEADER.lower().encode()
_INDEX = INDEX_HEADER.lower().encode()
_CLIENT = b":client"  # its address, among the headers: no name of theirs has a colon


class Gone(Exception):
    """The client went away before its request was whole."""


class SearchApp:
    """The ASGI application."""

    connections: Collection[Any] = ()
    """The server's open ones: the first of them tells."""
    excess = 0.0
    """How many are to leave for another process, each after an answer."""

    def __init__(self, service: SearchService, lifespan: Lifespan | None = None) -> None:
        """lifespan: what happens from uvicorn's start to its end."""
        self._service = service
        self._lifespan = lifespan
        self._routes: dict[str, tuple[str, Handler]] = {
            "/retrieve": ("POST", self._retrieve),
            "/access": ("POST", self._access),
            "/admin/reload": ("POST", self._reload),
            "/ready": ("GET", self._ready),
            "/health": ("GET", self._told(service.health)),
            "/info": ("GET", self._told(service.info)),
            "/metrics": ("GET", self._metrics),
            "/": ("GET", self._page),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self._lifespan is not None:
            await self._lifespan(self, receive, send)
            return
        status, headers, body = await self._guarded(scope, receive)
        if scope["path"] in SEARCHES:
            self._service.statistics.requests.labels(scope["path"], status).inc()
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.excess > 0:
            self.excess -= 1
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _guarded(self, scope: Scope, receive: Receive) -> Answer:
        """Whatever happens, an answer in JSON."""
        path = scope["path"]
        if path not in self._routes:
            return _refusal(404, f"{path}: not found.")
        method, handler = self._routes[path]
        if scope["method"] not in (method, "HEAD" if method == "GET" else method):
            status, headers, body = _refusal(
                405, f"{path} takes {method}, found {scope['method']}."
            )
            return status, [*headers, (b"allow", method.encode())], body
        try:
            body = await read_body(receive) if method == "POST" else b""
            client = (scope.get("client") or ("",))[0].encode()
            return await handler(body, {**dict(scope["headers"]), _CLIENT: client})
        except wire.NotServed as problem:
            return _refusal(problem.status, str(problem), problem.retry_after_s)
        except TimeoutError:
            return _refusal(503, "no answer in time: the server is overloaded.", 1)
        except Gone:
            return 400, [], b""  # nobody reads it
        except Exception as problem:
            logger.exception("%s failed", path)
            return _refusal(500, f"the search failed: {type(problem).__name__}: {problem}")

    async def _retrieve(self, body: bytes, headers: Given) -> Answer:
        request = wire.read_retrieve(body)
        trace = headers.get(_TRACE, b"").decode("latin-1")
        wait_s, client = _seconds(headers.get(_DEADLINE)), headers[_CLIENT].decode()
        answer = await self._service.retrieve(request, trace=trace, wait_s=wait_s, client=client)
        told = [_JSON, (_INDEX, answer.index.encode())]
        return 200, told, wire.write_results(answer.results, request.return_scores)

    async def _access(self, body: bytes, headers: Given) -> Answer:
        pages, index = self._service.access(wire.read_access(body))
        return 200, [_JSON, (_INDEX, index.encode())], wire.write_pages(pages)

    async def _reload(self, body: bytes, headers: Given) -> Answer:
        # Where a request comes from says nothing: behind a port forward all come from here.
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not secrets.compare_digest(given, self._service.admin_token.encode()):
            return _refusal(401, f"/admin/reload: {_TOKEN_NEEDED}")
        try:
            index = await self._service.reload(wire.read_object(body or b"{}"))
        except (RLFlowError, OSError) as problem:  # a path that the system refuses, too
            return _json({"detail": str(problem), "kept": self._service.info()}, 422)
        return _json(index.info)

    async def _ready(self, body: bytes, headers: Given) -> Answer:
        return _json(self._service.health(), 200 if self._service.state_of_all == "ready" else 503)

    async def _metrics(self, body: bytes, headers: Given) -> Answer:
        told = self._service.statistics.exposition()
        return 200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], told

    async def _page(self, body: bytes, headers: Given) -> Answer:
        return 200, [(b"content-type", b"text/html; charset=utf-8")], STATUS_PAGE.read_bytes()

    def _told(self, report: Callable[[], dict[str, Any]]) -> Handler:
        async def handler(body: bytes, headers: Given) -> Answer:
            return _json(report())

        return handler


def _json(value: Any, status: int = 200) -> Answer:
    """An answer of whatever a value holds: a path or a name from outside may not be UTF-8."""
    return status, [_JSON], dump_json(value)


def _refusal(status: int, text: str, retry_after_s: int | None = None) -> Answer:
    headers = [_JSON]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    return status, headers, wire.write_error(text)


def _seconds(header: bytes | None) -> float | None:
    """The seconds that a deadline header grants; None without a usable one."""
    try:
        seconds = float(header) if header else 0.0
    except ValueError:
        return None
    return seconds if seconds > 0 else None


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request. Raises NotServed for one that is too large, Gone where its
    client left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise wire.NotServed(f"the body is larger than {MAX_BODY_BYTES} bytes.", status=413)
        if not message.get("more_body"):
            return b"".join(parts)
