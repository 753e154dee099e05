"""The HTTP face of a SearchService.

`POST /retrieve` and `POST /access`, which rollouts call thousands of times per step, are answered by plain ASGI functions;
FastAPI would cost more than the search itself. Everything else is FastAPI.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from rlflow.errors import RLFlowError
from rlflow_environments.retrieval.client.trace import DEADLINE_HEADER, TRACE_HEADER
from rlflow_environments.retrieval.server import wire
from rlflow_environments.retrieval.server.records import dump_json
from rlflow_environments.retrieval.server.service import SearchService, Unavailable
from rlflow_environments.retrieval.server.status_page import STATUS_PAGE

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Lifespan = Callable[[Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 64 << 20
_JSON = (b"content-type", b"application/json")
_TOKEN_NEEDED = "expected 'Authorization: Bearer TOKEN'; the server's first line says which file holds its token."
_TRACE, _DEADLINE = TRACE_HEADER.lower().encode(), DEADLINE_HEADER.lower().encode()


class _Answer(JSONResponse):
    """JSON of whatever a value holds: a path or a name from outside may not be UTF-8."""

    def render(self, content: Any) -> bytes:
        return dump_json(content)


class Gone(Exception):
    """The client went away before its request was whole."""


class SearchApp:
    """The ASGI application."""

    connections: Collection[Any] = ()
    """The server's open ones: the first of them tells."""
    excess = 0
    """How many are to leave for another process, each after an answer."""

    def __init__(self, service: SearchService, lifespan: Lifespan | None = None) -> None:
        """lifespan: what happens from uvicorn's start to its end."""
        self._service = service
        self._lifespan = lifespan
        self._api = make_api(service)
        self._routes = {"/retrieve": self._retrieve, "/access": self._access}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self._lifespan is not None:
            await self._lifespan(receive, send)
            return
        handler = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None:
            await self._api(scope, receive, send)
            return
        status, headers, body = await self._guarded(handler, scope, receive)
        self._service.statistics.requests.labels(scope["path"], status).inc()
        headers = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
        if self.excess > 0:
            self.excess -= 1
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _guarded(
        self, handler: Callable[..., Awaitable[tuple[Headers, bytes]]], scope: Scope, receive: Receive
    ) -> tuple[int, Headers, bytes]:
        """(status, further headers, body): whatever happens, an answer in JSON."""
        if scope["method"] != "POST":
            return 405, [(b"allow", b"POST")], wire.write_error(f"{scope['path']} takes POST, found {scope['method']}.")
        try:
            return 200, *await handler(await read_body(receive), dict(scope["headers"]))
        except wire.BadRequest as problem:
            return problem.status, [], wire.write_error(str(problem))
        except Unavailable as problem:
            wait = (b"retry-after", b"%d" % problem.retry_after_s)
            return problem.status, [wait], wire.write_error(str(problem))
        except TimeoutError:
            return 503, [(b"retry-after", b"1")], wire.write_error("no answer in time: the server is overloaded.")
        except Gone:
            return 400, [], b""  # nobody reads it
        except Exception as problem:
            logger.exception("%s failed", scope["path"])
            return 500, [], wire.write_error(f"the search failed: {type(problem).__name__}: {problem}")

    async def _retrieve(self, body: bytes, headers: dict[bytes, bytes]) -> tuple[Headers, bytes]:
        request = wire.read_retrieve(body)
        trace = headers.get(_TRACE, b"").decode("latin-1")
        answer = await self._service.retrieve(request, trace=trace, wait_s=_seconds(headers.get(_DEADLINE)))
        return [(b"x-index", answer.index.encode())], wire.write_results(answer.results, request.return_scores)

    async def _access(self, body: bytes, headers: dict[bytes, bytes]) -> tuple[Headers, bytes]:
        return [], wire.write_pages(self._service.access(wire.read_access(body)))


def make_api(service: SearchService) -> FastAPI:
    """Everything beside the two endpoints of the wire format."""
    api = FastAPI(title="rlflow search", docs_url=None, redoc_url=None, openapi_url=None)

    @api.get("/health")
    async def health() -> Response:
        return _Answer(service.health())

    @api.get("/ready")
    async def ready() -> Response:
        return _Answer(service.health(), status_code=200 if service.state_of_all == "ready" else 503)

    @api.get("/info")
    async def info() -> Response:
        return _Answer(service.info())

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    @api.get("/status")
    async def status() -> Response:
        return _Answer(service.status())

    @api.get("/recent")
    async def recent(request: Request) -> Response:
        if not _has_token(request, service):  # what others ask is not for everybody who may ask too
            return _Answer({"detail": f"/recent: {_TOKEN_NEEDED}"}, status_code=401)
        return _Answer(service.recent())

    @api.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(STATUS_PAGE)

    @api.post("/admin/reload")
    async def reload(request: Request) -> Response:
        if not _has_token(request, service):
            return _Answer({"detail": f"/admin/reload: {_TOKEN_NEEDED}"}, status_code=401)
        try:
            changes = wire.read_object(await read_body(request.receive) or b"{}")
            index = await service.reload(changes)
        except wire.BadRequest as problem:
            return _Answer({"detail": str(problem)}, status_code=problem.status)
        except Unavailable as problem:
            return _Answer({"detail": str(problem)}, status_code=problem.status)
        except Gone:
            return _Answer({"detail": "the request ended before its body did."}, status_code=400)
        except (RLFlowError, OSError) as problem:  # a path that the system refuses, too
            return _Answer({"detail": str(problem), "kept": service.info()}, status_code=422)
        return _Answer(index.info)

    return api


def _has_token(request: Request, service: SearchService) -> bool:
    """Whether the sender knows the token. Where a request comes from says nothing: behind a port forward all come from here."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), service.admin_token.encode())


def _seconds(header: bytes | None) -> float | None:
    """The seconds that a deadline header grants; None without a usable one."""
    try:
        seconds = float(header) if header else 0.0
    except ValueError:
        return None
    return seconds if seconds > 0 else None


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request. Raises BadRequest for one that is too large, Gone where its client left."""
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
            raise wire.BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes.", status=413)
        if not message.get("more_body"):
            return b"".join(parts)
