"""The one policy for requests over HTTP that fail: which may be sent again, when, and for how long; and whether anybody is there.

An attempt is a function of the caller; it raises Retryable for a failure that may pass, and anything else for one that will not.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx

LONGEST_RETRY_AFTER_S = 30.0
ELSEWHERE = "192.0.2.1"  # of TEST-NET, RFC 5737

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """At most `tries` attempts, the first included (None: as many as the time allows), and at most `timeout_s` from the first
    attempt to the last answer.

    The pause before attempt n+1 is uniform in [0, first_pause_s * 2**(n-1)], at most longest_pause_s, on top of what the server
    asks for: "full jitter" (AWS Architecture Blog, "Exponential Backoff And Jitter", 2015), so that the clients of a server that
    was down do not all come back in the same moment.
    """

    tries: int | None
    first_pause_s: float
    longest_pause_s: float
    timeout_s: float = math.inf

    def call(self, attempt: Callable[[], T], generator: random.Random) -> T:
        """The first attempt's result that is one. Raises GaveUp, and what the attempt raises besides Retryable."""
        attempts = _Attempts(self, generator)
        while True:
            try:
                return attempt()
            except Retryable as failure:
                pause_s = attempts.pause_s(failure)
            time.sleep(pause_s)

    async def call_async(self, attempt: Callable[[float], Awaitable[T]], generator: random.Random) -> T:
        """As `call`; an attempt is given the deadline, in time.monotonic's seconds, and is cancelled when it has passed."""
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

    retry_after_s: the server asks not to be asked before. server_failed: the server itself is in trouble, so that others are
    better asked for a while; not so where it only has too much to do. at_once: the next attempt need not wait.
    """

    def __init__(
        self, text: str, *, retry_after_s: float = 0.0, server_failed: bool = True, at_once: bool = False
    ) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.server_failed = server_failed
        self.at_once = at_once


class GaveUp(Exception):
    """No attempt succeeded. attempts: how many were made. last: why the last one failed; None if none came to its end."""

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
            bound_s = backoff_s(self._policy.first_pause_s, self._policy.longest_pause_s, self._number)
            pause_s = failure.retry_after_s + self._generator.uniform(0, bound_s)
        if (self._policy.tries is not None and self._number >= self._policy.tries) or time.monotonic() + pause_s >= self.deadline:
            raise self.gave_up()
        self._number += 1
        return pause_s

    def gave_up(self) -> GaveUp:
        """The error after the present attempt."""
        return GaveUp(self._number, time.monotonic() - self._start, self._last)


def backoff_s(first_s: float, longest_s: float, failures: int) -> float:
    """The pause after a number of failures in a row (from 1), in seconds: it doubles from `first_s` on, up to `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 60))


def post(client: httpx.Client, url: str, body: Mapping[str, Any]) -> tuple[httpx.Response, str]:
    """One attempt: an answer whose status no repetition would change, and how its text begins. Raises Retryable."""
    import httpx

    try:
        response = client.post(url, json=body)
    except httpx.HTTPError as failure:
        raise Retryable(f"{type(failure).__name__} {failure}".rstrip()) from None
    excerpt = response.text[:300]
    check_status("", response.status_code, response.headers, excerpt)
    return response, excerpt


def check_status(where: str, status: int, headers: Mapping[str, str], excerpt: str) -> None:
    """Raises Retryable for a status that may pass: 429, too many requests, and 5xx, the server's own failures."""
    if status == 429 or status >= 500:
        raise Retryable(
            f"{where}status {status}: {excerpt}", retry_after_s=retry_after_s(headers), server_failed=status != 429
        )


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The seconds of Retry-After (RFC 9110, 10.2.3), at most 30; 0 without them, and for its other form, a date."""
    try:
        return min(LONGEST_RETRY_AFTER_S, max(0.0, float(headers.get("retry-after", ""))))
    except ValueError:
        return 0.0


def unreachable(host: str, port: int, timeout_s: float = 3.0) -> str | None:
    """Why no server takes connections there; None where one does."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as failure:
        return str(failure) or type(failure).__name__
    return None


def own_address(towards: str = "") -> str:
    """What other machines call this one that are reached by the same way as `towards`, host:port; without a host ("auto"), the
    address towards the default route. Nothing is sent: the kernel only chooses the interface."""
    host, _, port = towards.removeprefix("ray://").rpartition(":")
    host = (host if port.isdigit() else "").strip("[]") or ELSEWHERE
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
