"""The choice among several servers: those that answer, the less busy first."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rlflow.errors import ConfigError
from rlflow.net.http import backoff_s

logger = logging.getLogger(__name__)

REST_S = 0.5
LONGEST_REST_S = 30.0
BETWEEN_LISTINGS_S = 1.0


@dataclass
class _Server:
    in_flight: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic


@dataclass
class ServerPool:
    """The servers of a list that may change. A server that failed rests, longer each time, while
    others are asked.

    addresses: the present ones, `host:port` or URLs; asked again when a server fails, and now and
    then. Used by one thread."""

    addresses: Callable[[], Sequence[str]]
    generator: random.Random
    _servers: dict[str, _Server] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)  # addresses that are none
    _listed: float = -math.inf

    def take(self, avoid: str | None = None) -> str | None:
        """The URL of the server to ask now, None where there is none; `release` it afterwards.
        avoid: the one that failed."""
        self._list()
        now = time.monotonic()
        awake = [
            url
            for url, server in self._servers.items()
            if server.rests_until <= now and url != avoid
        ]
        if awake:
            # The less busy of two at random: nearly as even as the least busy of all, and clients
            # do not flock to it (Mitzenmacher 2001).
            chosen = min(
                self.generator.sample(awake, min(2, len(awake))),
                key=lambda url: self._servers[url].in_flight,
            )
        elif self._servers:
            chosen = min(
                self._servers,
                key=lambda url: (self._servers[url].rests_until, self.generator.random()),
            )
        else:
            return None
        self._servers[chosen].in_flight += 1
        return chosen

    def release(self, url: str, failed: bool | None) -> None:
        """Records the end of a request. failed: None where it was given up, which says nothing."""
        server = self._servers.get(url)
        if server is None:  # it left the list in the meantime
            return
        server.in_flight = max(0, server.in_flight - 1)  # it may have left and come back
        if failed is None:
            return
        if not failed:
            server.failures, server.rests_until = 0, 0.0
            return
        server.failures += 1
        server.rests_until = time.monotonic() + backoff_s(REST_S, LONGEST_REST_S, server.failures)
        self._listed = -math.inf

    def others(self, url: str) -> bool:
        """Whether another server than this one is awake."""
        now = time.monotonic()
        return any(
            other != url and server.rests_until <= now for other, server in self._servers.items()
        )

    def _list(self) -> None:
        now = time.monotonic()
        if now - self._listed < BETWEEN_LISTINGS_S:
            return
        self._listed = now
        urls = []
        for address in self.addresses():
            try:
                urls.append(server_url(address))
            except ConfigError as problem:
                if address not in self._told:
                    logger.warning("%s It is left out.", problem)
                self._told.add(address)
        self._servers = {url: self._servers.get(url) or _Server() for url in urls}


def server_url(address: str) -> str:
    """`http://host:port` of an address with or without a scheme, and without a trailing slash.
    Raises ConfigError."""
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and "\ufffd" not in url  # of a discovery file that is no text
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            "retriever http: expected a server as http://host:port or host:port, found "
            f"'{address}'."
        )
    return url.removesuffix("/retrieve")  # where the field's configurations give the whole path
