"""Requests over HTTP: one client, and one policy for those that fail: which are sent again, when,
for how long.

An attempt is a function of the caller; it raises Retryable for a failure that may pass, and
anything else for one that will not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.errors import ConfigError
from rlflow.storage.daemon import start_daemon

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 10.0
KEEPALIVE_S = 4.0  # below the 5 s after which uvicorn closes an idle connection
CLOSE_S = 2.0
EXCERPT = 300  # characters of an answer that an error tells
LONGEST_ANSWER = 256 * 2**20  # bytes: more is nothing that is asked for here
LONGEST_RETRY_AFTER_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """At most `tries` attempts, the first included (None: as many as the time allows), and at most
    `timeout_s` from the first attempt to the last answer.

    The pause before attempt n+1 is uniform in [0, first_pause_s * 2**(n-1)], at most
    longest_pause_s, on top of what the server asks for: "full jitter" (AWS Architecture Blog,
    "Exponential Backoff And Jitter", 2015), so that the clients of a server that was down do not
    all come back in the same moment."""

    tries: int | None
    first_pause_s: float
    longest_pause_s: float
    timeout_s: float = math.inf

    def call(self, attempt: Callable[[], T], generator: random.Random) -> T:
        """The first attempt's result that is one. Raises GaveUp, and what the attempt raises
        besides Retryable."""
        attempts = _Attempts(self, generator)
        while True:
            try:
                return attempt()
            except Retryable as failure:
                pause_s = attempts.pause_s(failure)
            time.sleep(pause_s)

    async def call_async(
        self, attempt: Callable[[float], Awaitable[T]], generator: random.Random
    ) -> T:
        """As `call`; an attempt is given the deadline, in time.monotonic's seconds, and is
        cancelled when it has passed."""
        attempts = _Attempts(self, generator)
        try:
            async with asyncio.timeout(None if math.isinf(self.timeout_s) else self.timeout_s):
                while True:
                    try:
                        return await attempt(attempts.deadline)
                    except Retryable as failure:
                        pause_s = attempts.pause_s(failure)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise attempts.gave_up() from None


class Retryable(Exception):
    """An attempt that failed in a way that may pass.

    retry_after_s: the server asks not to be asked before. server_failed: the server itself is in
    trouble, so that others are better asked for a while; not so where it only has too much to do.
    at_once: the next attempt need not wait."""

    def __init__(
        self,
        text: str,
        *,
        retry_after_s: float = 0.0,
        server_failed: bool = True,
        at_once: bool = False,
    ) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.server_failed = server_failed
        self.at_once = at_once


class GaveUp(Exception):
    """No attempt succeeded. attempts: how many were made. last: why the last one failed; None if
    none came to its end."""

    def __init__(self, attempts: int, spent_s: float, last: Retryable | None) -> None:
        super().__init__(f"{attempts} attempts in {spent_s:.1f} s; last: {last}")
        self.attempts = attempts
        self.spent_s = spent_s
        self.last = last


class _Attempts:
    """The attempts at one request so far."""

    def __init__(self, policy: RetryPolicy, generator: random.Random) -> None:
        self._policy = policy
        self._generator = generator
        self._start = time.monotonic()
        self.deadline = self._start + policy.timeout_s
        self._number = 1  # of the attempt under way
        self._last: Retryable | None = None

    def pause_s(self, failure: Retryable) -> float:
        """Seconds until the next attempt. Raises GaveUp where there is none."""
        self._last = failure
        pause_s = 0.0
        if not failure.at_once:
            bound_s = backoff_s(
                self._policy.first_pause_s, self._policy.longest_pause_s, self._number
            )
            pause_s = failure.retry_after_s + self._generator.uniform(0, bound_s)
        if (
            self._policy.tries is not None and self._number >= self._policy.tries
        ) or time.monotonic() + pause_s >= self.deadline:
            raise self.gave_up()
        self._number += 1
        return pause_s

    def gave_up(self) -> GaveUp:
        """The error after the present attempt."""
        return GaveUp(self._number, time.monotonic() - self._start, self._last)


def backoff_s(first_s: float, longest_s: float, failures: int) -> float:
    """The pause after a number of failures in a row (from 1), in seconds: it doubles from `first_s`
    on, up to `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 60))


@dataclass(frozen=True)
class Reply:
    """An answer, whole."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    @property
    def excerpt(self) -> str:
        """How the text begins."""
        return self.text[:EXCERPT]

    def json(self) -> Any:
        """Raises ValueError, RecursionError."""
        return json.loads(self.content)

    def checked(self, where: str = "") -> Reply:
        """The answer itself. Raises Retryable for a status that may pass."""
        check_status(where, self.status, self.headers, self.excerpt)
        return self


class Session:
    """Connections to servers, in the event loop of the first request."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        connections: int = 100,
        timeout_s: float | None = None,
        keepalive_s: float = KEEPALIVE_S,
        proxies: bool = False,
        socket_path: str | None = None,
    ) -> None:
        """connections: open at a time. timeout_s: of a request, where that has none of its own.
        keepalive_s: how long an unused connection is kept, 0 for not at all. proxies: of the
        environment variables (HTTPS_PROXY, NO_PROXY, ...). socket_path: of this machine, by which
        every address is reached."""
        self._headers, self._connections, self._timeout_s = headers, connections, timeout_s
        self._keepalive_s, self._proxies, self._socket = keepalive_s, proxies, socket_path
        self._opened: aiohttp.ClientSession | None = None

    async def ask(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        where: str = "",
    ) -> Reply:
        """The answer, whatever its status; a redirection is one, and not followed: keys go where
        they were meant to. body: bytes, or what is sent as JSON. where: begins the error's text.
        Raises Retryable where there is none, or not in time."""
        import aiohttp

        opened = self._opened or self._open()
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        sent = {"Content-Type": "application/json", **(headers or {})} if data else headers
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        options: dict[str, Any] = self._proxy(url) if self._proxies else {}
        options |= {"data": data, "headers": sent, "allow_redirects": False}
        try:
            async with asyncio.timeout(limit_s):
                async with opened.request(method, url, **options) as answer:
                    return Reply(answer.status, answer.headers, await _content(answer, where))
        except TimeoutError:
            told = "no connection" if limit_s is None else f"no answer within {limit_s:.1f} s"
            raise Retryable(f"{where}{told}") from None
        except aiohttp.ClientConnectorError as problem:
            code = problem.os_error.errno or 0
            why = os.strerror(code) if code > 0 else problem.os_error.strerror  # < 0: the name's
            told = f"no connection to {problem.host}:{problem.port}: {why}"
            raise Retryable(f"{where}{told}") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise Retryable(f"{where}{type(problem).__name__} {problem}".rstrip()) from None

    async def close(self) -> None:
        """Ends the connections."""
        if self._opened is not None:
            await self._opened.close()

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        kept = (
            {"keepalive_timeout": self._keepalive_s} if self._keepalive_s else {"force_close": True}
        )
        limit = self._connections
        connector = (
            aiohttp.TCPConnector(limit=limit, **kept)
            if self._socket is None
            else aiohttp.UnixConnector(self._socket, limit=limit, **kept)
        )
        self._opened = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        return self._opened

    def _proxy(self, url: str) -> dict[str, Any]:
        """The proxy of a URL. Not aiohttp's trust_env: a ~/.netrc would then replace the key."""
        from aiohttp.helpers import get_env_proxy_for_url
        from yarl import URL

        try:
            proxy, credentials = get_env_proxy_for_url(URL(url))
        except LookupError:
            return {}
        return {"proxy": proxy, "proxy_auth": credentials}


async def _content(answer: aiohttp.ClientResponse, where: str) -> bytes:
    """The body. Raises Retryable for one of more than LONGEST_ANSWER, packed ones unpacked."""
    length, packed = answer.content_length, "Content-Encoding" in answer.headers
    if length is not None and length <= LONGEST_ANSWER and not packed:
        return await answer.read()
    found = bytearray()
    async for part in answer.content.iter_any():
        found += part
        if len(found) > LONGEST_ANSWER:
            answer.close()
            raise Retryable(f"{where}an answer of more than {LONGEST_ANSWER >> 20} MiB")
    return bytes(found)


class HttpClient:
    """A Session in an event loop of its own, for callers in any thread and any event loop."""

    def __init__(self, *, at_once: int | None = None, **options: Any) -> None:
        """at_once: how much of what is submitted runs at a time, None: all. options: of Session."""
        self.session = Session(**options)
        self._loop = asyncio.new_event_loop()
        self._slots = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)
        start_daemon("http", self._loop.run_forever)
        self._end = weakref.finalize(self, _end, self._loop, self.session)

    def submit(
        self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
    ) -> concurrent.futures.Future[T]:
        """The result of a coroutine function, to come. Raises RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("this HTTP client is closed")
        return asyncio.run_coroutine_threadsafe(self._run(work, arguments), self._loop)

    def call(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """The result of a coroutine function."""
        future = self.submit(work, *arguments)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """Cancels what is under way and closes the connections; nothing happens the second time."""
        self._end()

    async def _run(
        self, work: Callable[..., Coroutine[Any, Any, T]], arguments: Sequence[Any]
    ) -> T:
        async with self._slots:
            return await work(*arguments)


def _end(loop: asyncio.AbstractEventLoop, session: Session) -> None:
    """Closes the connections and ends the client's thread."""

    async def end() -> None:
        others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
        for task in others:
            task.cancel()
        if others:  # who waits for them hears of it
            await asyncio.wait(others, timeout=CLOSE_S / 2)
        await session.close()
        loop.call_soon(loop.stop)

    ended = asyncio.run_coroutine_threadsafe(end(), loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no event loop here, which must not wait
        with contextlib.suppress(TimeoutError):
            ended.result(CLOSE_S)


def model_client(
    option: str, url: str, route: str, key: str | None, concurrency: int, timeout_s: float
) -> tuple[str, HttpClient]:
    """The address of a model's API, without the route that users paste with it, and a client that
    sends the key and asks at most `concurrency` times at once. option: what the user calls the
    address. timeout_s: of an attempt. Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{option}: expected an address such as http://localhost:8000/v1, found '{url}'."
        )
    client = HttpClient(
        at_once=concurrency,
        connections=concurrency,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout_s=timeout_s,
        proxies=True,
    )
    return url.rstrip("/").removesuffix(route), client


def fetch(url: str, *, timeout_s: float = CONNECT_S, **options: Any) -> Reply:
    """The answer to one GET. options: of Session. Raises Retryable where there is none."""
    client = HttpClient(timeout_s=timeout_s, **options)
    try:
        return client.call(client.session.ask, "GET", url)
    finally:
        client.close()


def check_status(where: str, status: int, headers: Mapping[str, str], excerpt: str) -> None:
    """Raises Retryable for a status that may pass: 429, too many requests, and 5xx, the server's
    own failures."""
    if status == 429 or status >= 500:
        raise Retryable(
            f"{where}status {status}: {excerpt}",
            retry_after_s=retry_after_s(headers),
            server_failed=status != 429,
        )


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The seconds of Retry-After (RFC 9110, 10.2.3), at most 30; 0 without them, and for its other
    form, a date."""
    try:
        return min(LONGEST_RETRY_AFTER_S, max(0.0, float(headers.get("retry-after", ""))))
    except ValueError:
        return 0.0
