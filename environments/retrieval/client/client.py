"""The retriever that asks servers over HTTP: any that speak the field's wire format, ours or
others'."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlflow.components import takes
from rlflow.errors import ConfigError, did_you_mean
from rlflow.http import GaveUp, HttpClient, Retryable, RetryPolicy
from rlflow_environments.retrieval.client.answers import (
    NotASearchServer,
    SearchRequest,
    page_request,
    search_request,
)
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever, CacheCounts
from rlflow_environments.retrieval.client.cache import SearchCache
from rlflow_environments.retrieval.client.circuit import Circuit
from rlflow_environments.retrieval.client.servers import ServerPool, server_url
from rlflow_environments.retrieval.client.trace import DEADLINE_HEADER, TRACE_HEADER
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import RetrievalError
from rlflow_environments.retrieval.server.discovery import read_addresses

logger = logging.getLogger("rlflow.search.client")  # under `rlflow`, so that a run's log has it

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
POLL_S = 0.3
REPORT_EVERY_S = 10.0
STRANGERS = 3  # answers that are none of a retrieval server, before the address is called wrong

T = TypeVar("T")


class HttpRetriever(AsyncRetriever):
    """Passages from servers, with retries, failover and a cache.

    A search has one deadline over all its attempts. Only what may pass is tried again: connections
    that fail, time-outs, 429 and 5xx; between attempts it pauses, at random and longer each time,
    or as long as the server asks. Where all attempts fail it raises RetrievalError, which aborts
    the episode; the error never becomes text."""

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        discovery: str | Path | None = None,
        timeout_s: float = 30.0,
        attempt_timeout_s: float = 10.0,
        tries: int | None = None,
        connections: int = 256,
        wait_s: float = 60.0,
        cache: Mapping[str, Any] | None = None,
        identity: str | None = None,
        headers: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """Waits until a server is ready.

        urls: one server or several, `http://host:port` or `host:port`. discovery: a folder of
        `Host{ip}_IP{port}.txt` files, read again whenever a server fails. timeout_s: of a search,
        all attempts and pauses together; tries: attempts, the first included (None: until
        timeout_s), each of at most attempt_timeout_s. connections: open at the same time; further
        searches wait, within their deadline. wait_s: for a first server to be ready. cache:
        {directory, mode}, see `cache.MODES`. identity: of the index, for the cache, where the
        server does not say it. headers: sent with every request. seed: of pauses and choices.
        Raises ConfigError."""
        given = {"timeout_s": timeout_s, "attempt_timeout_s": attempt_timeout_s}
        given |= {"connections": connections, "tries": 1 if tries is None else tries}
        _check_numbers(**given)
        tries = None if tries is None else int(tries)
        self._policy = RetryPolicy(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S, timeout_s)
        self._attempt_timeout_s = attempt_timeout_s
        self._given_identity = identity
        self._generator = random.Random(seed)
        self._cache = _make_cache(cache)
        self._told_cache = False
        self.cache_counts = None if self._cache is None else CacheCounts()
        self._pool = ServerPool(_address_source(urls, discovery, self._cache), self._generator)
        self._where = (
            f"the folder {discovery}" if discovery is not None else ", ".join(_as_list(urls))
        )
        self._circuit = Circuit(self._where)
        self._known = False  # whether a search was ever answered: the address is right then
        self._strangers = 0
        self._slots = asyncio.Semaphore(connections)
        self._identified = asyncio.Lock()
        self._client = HttpClient(headers=headers, connections=connections)
        if self._cache is None or not self._cache.identified or self._cache.mode == "record":
            self._client.call(self._wait_until_ready, wait_s)

    # ------------------------------------------------------------ searching

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever: one request for all that the cache does not hold. Raises RetrievalError,
        ReplayMissError."""
        if top_k < 1:
            raise ConfigError(f"top_k: expected at least 1, found {top_k}.")
        return self._open.call(self._search, list(queries), top_k, "") if queries else []

    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        """See AsyncRetriever. Raises RetrievalError, ReplayMissError."""
        found = self._open.submit(self._search, [query], top_k, trace)
        return (await asyncio.wrap_future(found))[0]

    async def page(self, url: str, *, trace: str = "") -> str | None:
        """See AsyncRetriever. Raises RetrievalError, ReplayMissError."""
        return await asyncio.wrap_future(self._open.submit(self._page, url, trace))

    def close(self) -> None:
        """Closes the connections; searches that are under way are cancelled, later ones raise
        RetrievalError."""
        self._client.close()

    async def _search(self, queries: list[str], top_k: int, trace: str) -> list[list[Passage]]:
        cache = self._cache
        if cache is None:
            return await self._ask(search_request(queries, top_k), trace)
        found = [await asyncio.to_thread(cache.get, query, top_k) for query in queries]
        missing = [
            query for query, passages in zip(queries, found, strict=True) if passages is None
        ]
        if self.cache_counts is not None:
            self.cache_counts.add(len(queries), len(queries) - len(missing))
        if not missing:
            return found  # type: ignore[return-value]
        await self._identify()
        asked: list[list[Passage]] = await self._ask(search_request(missing, top_k), trace)
        answers = iter(asked)
        for place, query in enumerate(queries):
            if found[place] is None:
                passages = found[place] = next(answers)
                await asyncio.to_thread(cache.put, query, top_k, passages)
        return found  # type: ignore[return-value]

    async def _page(self, page: str, trace: str) -> str | None:
        cache = self._cache
        if cache is None:
            return await self._ask(page_request(page), trace)
        # A search for no passages does not exist: under top_k 0 stand pages, as the one passage
        # that was found, or none.
        found = await asyncio.to_thread(cache.get, page, 0)
        if found is None:
            await self._identify()
            text = await self._ask(page_request(page), trace)
            found = [] if text is None else [Passage(page, "", text, page)]
            await asyncio.to_thread(cache.put, page, 0, found)
        return found[0].contents if found else None

    async def _ask(self, request: SearchRequest[T], trace: str) -> T:
        """The answer of some server, within the deadline. Raises RetrievalError when all attempts
        failed."""
        failed: str | None = None

        async def attempt(deadline: float) -> T:
            nonlocal failed
            for_all = await self._circuit.wait()
            # Waiting for a connection does not count as a failed attempt.
            with self._circuit.asking(for_all):
                async with self._slots:
                    failed = url = self._pool.take(failed)
                    if url is None:
                        raise Retryable(f"no server is listed in {self._where}")
                    try:
                        return await self._attempt(url, request, trace, deadline)
                    except Retryable as problem:
                        problem.at_once = problem.server_failed and self._pool.others(url)
                        if problem.server_failed and not problem.at_once:
                            self._circuit.failed(str(problem))
                        raise

        try:
            return await self._policy.call_async(attempt, self._generator)
        except GaveUp as end:
            last = end.last or self._circuit.last or "every connection was in use"
            most = "" if self._policy.tries is None else f" of {self._policy.tries}"
            raise RetrievalError(
                f"search failed after {end.attempts}{most} attempts in {end.spent_s:.1f} s; last: "
                f"{last}."
            ) from None

    async def _attempt(self, url: str, request: SearchRequest[T], trace: str, deadline: float) -> T:
        """The server's answer. Raises Retryable, and RetrievalError for what another attempt would
        not change."""
        seconds = max(0.001, min(self._attempt_timeout_s, deadline - time.monotonic()))
        failed = True
        try:
            answer = await self._post(url, request, trace, seconds)
            failed, self._known = False, True
            self._circuit.succeeded()
            return answer
        except Retryable as problem:
            failed = problem.server_failed
            raise
        except NotASearchServer as problem:
            # A discovery file may outlive its server, and another program may have its port by now;
            # a gateway answers with a page or 404 of its own while the server behind it starts.
            # Only where nothing else was ever heard it is a mistake.
            self._strangers += 1
            if self._known or self._strangers < STRANGERS or self._pool.others(url):
                raise Retryable(str(problem)) from None
            raise ConfigError(
                f"retriever http: {problem}. Give the address of a retrieval server."
            ) from None
        except RetrievalError:
            failed = False
            raise
        finally:
            self._pool.release(url, failed)

    async def _post(self, url: str, request: SearchRequest[T], trace: str, seconds: float) -> T:
        headers = {DEADLINE_HEADER: f"{seconds:.3f}", **({TRACE_HEADER: trace} if trace else {})}
        limits = {"timeout_s": seconds, "where": f"{url}: "}
        ask = self._client.session.ask
        reply = await ask("POST", url + request.path, request.body, headers=headers, **limits)
        return request.read(url, reply.status, reply.headers, reply.content)

    # ------------------------------------------------------------ the servers

    async def _wait_until_ready(self, wait_s: float) -> None:
        """Returns when a server says that it can answer. Raises ConfigError where none does in
        time."""
        start = reported = time.monotonic()
        while True:
            state = await self._state()
            if state is None:
                return
            now = time.monotonic()
            if now - start >= wait_s:
                raise ConfigError(
                    f"retriever http: no server is ready after {wait_s:g} s ({self._where}): "
                    f"{state}. Start one with `rlflow search serve`, fix the address, or wait "
                    "longer with wait_s."
                )
            if now - reported >= REPORT_EVERY_S:
                reported = now
                logger.warning("waiting for a retrieval server (%.0f s): %s", now - start, state)
            await asyncio.sleep(min(POLL_S, max(0.0, start + wait_s - now)))

    async def _state(self) -> str | None:
        """None if the server that would be asked next can answer, else what it says."""
        status, content = await self._get("/ready")
        if status not in (None, 503):  # others know no /ready: what answers is taken for ready
            return None
        return content.decode("utf-8", "replace")[:300]

    async def _identify(self) -> None:
        """Tells the cache, once, which index the servers have."""
        async with self._identified:
            cache = self._cache
            if cache is not None and not self._told_cache:
                cache.identify(self._given_identity or await self._served_identity())
                self._told_cache = True

    async def _served_identity(self) -> str:
        status, content = await self._get("/info")
        if status is None:
            raise RetrievalError(content.decode())
        try:
            identity = json.loads(content).get("identity") if status == 200 else None
        except (ValueError, AttributeError):
            identity = None
        if not identity:
            raise ConfigError(
                f"retriever http: {self._where} does not tell which index it has, and the cache "
                "must know. Name it: identity: my-index."
            )
        return str(identity)

    async def _get(self, path: str) -> tuple[int | None, bytes]:
        """(status, body) of a GET; (None, why) where there is no answer."""
        url = self._pool.take()
        if url is None:
            return None, b"none is listed"
        failed = True
        try:
            ask = self._client.session.ask
            reply = await ask(
                "GET", url + path, timeout_s=self._attempt_timeout_s, where=f"{url}{path}: "
            )
            failed = reply.status == 503
            return reply.status, reply.content
        except Retryable as problem:
            return None, str(problem).encode()
        finally:
            self._pool.release(url, failed)

    @property
    def _open(self) -> HttpClient:
        """Raises RetrievalError after `close`."""
        if self._client.closed:
            raise RetrievalError("retriever http: it was closed.")
        return self._client


@takes(HttpRetriever)
def http_retriever(
    corpus: Sequence[Passage] | None = None,
    *,
    url: str | None = None,
    urls: str | Sequence[str] | None = None,
    **options: Any,
) -> HttpRetriever:
    """The retriever of a configuration's `{name: http, url: ...}`; further options are those of
    HttpRetriever. The servers bring the documents."""
    return HttpRetriever(url if urls is None else urls, **options)


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(
                f"retriever http: {name}: expected a number above 0, found {value!r}."
            )
    if "tries" in numbers and numbers["tries"] != int(numbers["tries"]):
        raise ConfigError(
            f"retriever http: tries: expected a whole number, found {numbers['tries']}."
        )


def _make_cache(options: Mapping[str, Any] | None) -> SearchCache | None:
    """The cache; None for mode off. Raises ConfigError."""
    known = ("directory", "mode")
    for key in options or {}:
        if key not in known:
            raise ConfigError(
                f"cache: unknown option '{key}'; known: "
                f"{', '.join(known)}.{did_you_mean(key, known)}"
            )
    mode = (options or {}).get("mode", "off")
    mode = "off" if mode is False else mode  # YAML reads a bare `off` as false
    if not options or mode == "off":
        return None
    if not options.get("directory"):
        raise ConfigError(
            "cache: mode without a directory; give cache.directory, the folder of the records."
        )
    return SearchCache(options["directory"], str(mode))


def _as_list(urls: str | Sequence[str] | None) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls or ())


def _address_source(
    urls: str | Sequence[str] | None, discovery: str | Path | None, cache: SearchCache | None
) -> Any:
    """A function that lists the servers. Raises ConfigError where none or both ways are given."""
    given = _as_list(urls)
    if bool(given) == (discovery is not None) and not (cache is not None and cache.strict):
        raise ConfigError(
            "retriever http: give either urls, of one server or several, or discovery, a folder "
            "of addresses."
        )
    for address in given:
        server_url(address)
    return (lambda: read_addresses(discovery)) if discovery is not None else (lambda: given)
