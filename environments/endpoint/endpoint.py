"""The server that agents ask: a key per episode, one process, the rollout's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rlflow.errors import RLFlowError, install_command, needing
from rlflow.texts import wrong_name
from rlflow_environments.endpoint import anthropic_messages, chat, openai_responses
from rlflow_environments.endpoint.agent_session import AgentSession
from rlflow_environments.endpoint.requests import ModelReply, ModelRequest, RequestRefused

MAX_BODY_BYTES = 64 << 20
START_S, STOP_S = 30.0, 5.0
HUNG_UP = 499
"""Status of what nobody reads, as nginx has it."""
RETRIES = "x-stainless-retry-count"
"""Header in which the vendors' clients say how often they sent a request before."""
UNKNOWN = (
    "unknown key: expected that of an episode under way, as a bearer token, as x-api-key, or in "
    "the address: http://HOST:PORT/episodes/KEY/v1."
)


INTERFACES: Mapping[str, ModuleType] = {
    "chat/completions": chat,
    "messages": anthropic_messages,
    "responses": openai_responses,
}
"""How a vendor's clients ask, and how they want to be answered: `read`, `write`, `stream` and
`error` of a module."""


class Endpoint:
    """Serves the episodes that are open, at 127.0.0.1 unless told otherwise, in the event loop
    that starts it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """port: 0 takes a free one. Raises MissingPackageError."""
        with needing("the endpoint", install_command("agents")):
            import starlette.applications  # noqa: F401 -- are they there?
            import uvicorn  # noqa: F401
        self._host, self._port = host, port
        self._sessions: dict[str, AgentSession] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self.outside = 0
        """Requests that came for no open episode."""
        self.abandoned = 0
        """Requests whose client hung up before the answer."""
        self._metric_names: set[str] = set()  # that agents have posted
        self.application = self._application()
        """The server as an ASGI application, for clients of this process."""

    async def start(self) -> None:
        """Begins to answer. Raises RLFlowError."""
        import uvicorn

        from rlflow_environments.common.connections import ImpatientProtocol

        try:
            self._socket = socket.create_server((self._host, self._port), backlog=2048)
        except OSError as problem:
            raise RLFlowError(
                f"endpoint: cannot listen at {self._host}:{self._port} ({problem.strerror}); set "
                "another environment.host or environment.port."
            ) from None
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.application,
            http=ImpatientProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # they are this process's
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise RLFlowError("endpoint: the server ended as it started.")
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Answers no more."""
        for session in list(self._sessions.values()):
            self.close(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, STOP_S)
        self.release()

    def release(self) -> None:
        """Gives the port back, whatever became of the event loop."""
        if self._socket is not None:
            self._socket.close()

    def open(self, session: AgentSession) -> str:
        """The address of the episode; OpenAI's clients append nothing to it but `/v1`."""
        self._sessions[session.key] = session
        session.metric_names = self._metric_names
        return f"http://{self._host}:{self._port}/episodes/{session.key}"

    def close(self, session: AgentSession) -> None:
        """The episode has ended: whatever it still asks is refused."""
        self._sessions.pop(session.key, None)
        session.close()

    def _application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        routes = []
        for prefix in ("/v1", "/episodes/{key}", "/episodes/{key}/v1"):
            for path, interface in INTERFACES.items():
                handler = self._handler(interface, _asked)
                routes.append(Route(f"{prefix}/{path}", handler, methods=["POST"]))
            posted = self._handler(chat, _posted)
            routes.append(Route(f"{prefix}/reward", posted, methods=["POST"]))
            routes.append(Route(f"{prefix}/models", self._handler(chat, _models)))

        async def not_found(request: Any, problem: Any) -> Any:
            told = f"{request.method} {request.url.path}: {problem.detail}; expected POST of "
            refused = RequestRefused(told + ", ".join(INTERFACES), status=problem.status_code)
            return JSONResponse(chat.error(refused), refused.status)

        return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})

    def _handler(self, interface: ModuleType, answer: _Answer) -> Callable[[Any], Awaitable[Any]]:
        """An endpoint of starlette, which answers every problem in the interface's form."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response

        async def handle(request: Any) -> Any:
            try:
                return await answer(self._session(request), interface, request)
            except RequestRefused as refused:
                return JSONResponse(interface.error(refused), refused.status)
            except ClientDisconnect:
                self.abandoned += 1
                return Response(status_code=HUNG_UP)  # for nobody; without it the server complains

        return handle

    def _session(self, request: Any) -> AgentSession:
        """The session of a request. Raises RequestRefused."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.path_params.get("key") or request.headers.get("x-api-key") or bearer
        session = self._sessions.get(key)
        if session is None:
            self.outside += 1
            raise RequestRefused(UNKNOWN, status=401, code="invalid_api_key")
        return session


_Answer = Callable[[AgentSession, ModuleType, Any], Awaitable[Any]]


async def _asked(session: AgentSession, interface: ModuleType, request: Any) -> Any:
    from starlette.responses import JSONResponse, StreamingResponse

    body, data = await _body(request)
    asked = interface.read(body, session.conversations)
    name = hashlib.blake2b(interface.__name__.encode() + data, digest_size=16).hexdigest()
    again = request.headers.get(RETRIES, "0") != "0"
    reply = await _reply(session, asked, name, again, request)
    if not asked.stream:
        return JSONResponse(interface.write(reply))
    events = _in_turn(interface.stream(reply))
    return StreamingResponse(events, media_type="text/event-stream")


async def _reply(
    session: AgentSession, asked: ModelRequest, name: str, again: bool, request: Any
) -> ModelReply:
    """The session's reply. Raises RequestRefused; ClientDisconnect as soon as the client hangs up,
    so that no request outlives it."""
    from starlette.requests import ClientDisconnect

    hung_up = asyncio.ensure_future(request.receive())  # behind the body comes nothing else

    async def gone() -> bool:
        await asyncio.sleep(0)  # for what is on its way
        return hung_up.done()

    reply = asyncio.ensure_future(session.ask(asked, name, again, gone))
    try:
        await asyncio.wait({reply, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        raise ClientDisconnect
    finally:
        for task in (reply, hung_up):
            task.cancel()
        await asyncio.wait({reply, hung_up})


async def _in_turn(events: Iterator[str]) -> AsyncIterator[str]:
    """The events: of a plain iterator starlette would take each in another thread."""
    for event in events:
        yield event


async def _posted(session: AgentSession, interface: ModuleType, request: Any) -> Any:
    from starlette.responses import JSONResponse

    body, _ = await _body(request)
    metrics = body.get("metrics") or {}
    numbers = [body.get("reward"), *(metrics.values() if isinstance(metrics, dict) else [None])]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not _finite(number):
            raise RequestRefused('expected {"reward": NUMBER, "metrics": {NAME: NUMBER}}.')
    if problem := wrong_name(session.metric_names.union(metrics)):
        raise RequestRefused(f"metrics: {problem}, of all episodes together.")
    session.metric_names.update(metrics)
    session.posted = {"reward": float(body["reward"]), "metrics": metrics}
    return JSONResponse({"reward": session.posted["reward"]})


async def _models(session: AgentSession, interface: ModuleType, request: Any) -> Any:
    from starlette.responses import JSONResponse

    model = {"id": "rlflow", "object": "model", "created": 0, "owned_by": "rlflow"}
    return JSONResponse({"object": "list", "data": [model]})


async def _body(request: Any) -> tuple[dict[str, Any], bytes]:
    """The object that a request holds, and its bytes. Raises RequestRefused."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestRefused(f"the body has more than {MAX_BODY_BYTES} bytes.", status=413)
        parts.append(part)
    data = b"".join(parts)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestRefused("the body: expected a JSON object.")
    return body, data


def _finite(number: float) -> bool:
    with contextlib.suppress(OverflowError):
        return math.isfinite(float(number))
    return False
