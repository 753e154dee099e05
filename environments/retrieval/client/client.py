"""The retriever that asks servers over HTTP: any that speak the field's wire format, ours or
others'."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlflow.components import check_options
from rlflow.errors import ConfigError
from rlflow.net.http import GaveUp, HttpClient, Reply, Retryable, RetryPolicy
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.retrieval.client.answers import NotASearchServer, read_page, read_passages
from rlflow_environments.retrieval.client.asynchronous import (
    DEADLINE_HEADER,
    INDEX_HEADER,
    TRACE_HEADER,
    AsyncRetriever,
)
from rlflow_environments.retrieval.client.cache import SearchCache
from rlflow_environments.retrieval.client.servers import ServerPool, server_url
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import QueryRefusedError, RetrievalError
from rlflow_environments.retrieval.indices.base import RetrieverFacts, check_top_k
from rlflow_environments.retrieval.server.addresses import read_addresses

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
POLL_S = 0.3
REPORT_EVERY_S = 10.0
STRANGERS = 3  # answers that are none of a retrieval server, before the address is called wrong
FAILURES = 3  # in a row, of all searches together, before the log says that no server answers

T = TypeVar("T")
Read = Callable[[str, Reply], T]
"""(the endpoint's URL, the answer) -> what was asked for; raises as `read_passages` does."""


class HttpRetriever(AsyncRetriever):
    """Passages from servers, with retries, failover and a cache.

    A search has one deadline over all its attempts. Only what may pass is tried again: connections
    that fail, time-outs, 429 and 5xx; between attempts it pauses, at random and longer each time,
    or as long as the server asks. Where all attempts fail it raises RetrievalError, which aborts
    the episode; the error never becomes text."""

    facts = RetrieverFacts(shared=False, elsewhere=True)

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        url: str | None = None,
        discovery: str | Path | None = None,
        timeout_s: PositiveFloat = 30.0,
        attempt_timeout_s: PositiveFloat = 10.0,
        tries: PositiveInt | None = None,
        connections: PositiveInt = 256,
        wait_s: float = 60.0,
        cache: Mapping[str, Any] | None = None,
        identity: str | None = None,
        headers: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """Waits until a server is ready.

        urls, or url: one server or several, `http://host:port` or `host:port`. discovery: a folder
        of `Host{ip}_IP{port}.txt` files, read again after each failure. timeout_s: of a search,
        all attempts and pauses together; tries: attempts, the first included (None: until
        timeout_s), each of at most attempt_timeout_s. connections: open at the same time; further
        searches wait, within their deadline. wait_s: for a first server to be ready. cache:
        {directory, mode}, see `cache.Mode`. identity: of the index, for the cache, where the
        server does not say it. headers: sent with every request. seed: of pauses and choices.
        Raises ConfigError."""
        self._policy = RetryPolicy(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S, timeout_s)
        self._attempt_timeout_s = attempt_timeout_s
        self._given_identity = identity
        self._generator = random.Random(seed)
        self._cache = _make_cache(cache)
        self._told_cache = False
        self._counts = [0, 0]
        given = urls or url or ()
        given = [given] if isinstance(given, str) else list(given)
        strict = self._cache is not None and self._cache.strict
        if bool(given) == (discovery is not None) and not strict:
            raise ConfigError(
                "retriever http: give either urls, of one server or several, or discovery, a "
                "folder of addresses."
            )
        for address in given:
            server_url(address)
        self._where = ", ".join(given) if discovery is None else f"the folder {discovery}"
        listed = (lambda: given) if discovery is None else (lambda: read_addresses(discovery))
        self._pool = ServerPool(listed, self._generator)
        self._known = False  # whether a search was ever answered: the address is right then
        self._strangers = self._failures = 0
        self._slots = asyncio.Semaphore(connections)
        self._identified = asyncio.Lock()
        self._client = HttpClient(headers=headers, connections=connections)
        if self._cache is None or not self._cache.identified or self._cache.mode == "record":
            self._client.call(self._wait_until_ready, wait_s)
        elif not strict:
            # Else records of another index would be answers until the first search that has none
            with contextlib.suppress(Retryable):
                self._client.call(self._identify)

    # ------------------------------------------------------------ searching

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever: one request for all that the cache does not hold. Raises RetrievalError,
        ReplayMissError."""
        check_top_k(top_k)
        return self._open.call(self._search, list(queries), top_k, "") if queries else []

    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        """See AsyncRetriever. Raises RetrievalError, ReplayMissError."""
        found = self._open.submit(self._search, [query], top_k, trace)
        return (await asyncio.wrap_future(found))[0]

    async def page(self, url: str, *, trace: str = "") -> str | None:
        """See AsyncRetriever. Raises RetrievalError, ReplayMissError."""
        return await asyncio.wrap_future(self._open.submit(self._page, url, trace))

    def take_cache_counts(self) -> tuple[int, int]:
        """See AsyncRetriever."""
        (looked_up, held), self._counts = self._counts, [0, 0]
        return looked_up, held

    def close(self) -> None:
        """Closes the connections; searches that are under way are cancelled, later ones raise
        RetrievalError."""
        self._client.close()

    async def _search(self, queries: list[str], top_k: int, trace: str) -> list[list[Passage]]:
        found: list[list[Passage] | None] = [None] * len(queries)
        if self._cache is not None:
            found = [await asyncio.to_thread(self._cache.get, query, top_k) for query in queries]
            self._counts[0] += len(queries)
            self._counts[1] += len(queries) - found.count(None)
        places = [place for place, passages in enumerate(found) if passages is None]
        if not places:
            return found  # type: ignore[return-value]
        asked = [queries[place] for place in places]

        def read(endpoint: str, reply: Reply) -> list[list[Passage]]:
            return read_passages(endpoint, reply, len(asked), top_k)

        body = {"queries": asked, "topk": top_k, "return_scores": True}
        answers: list[list[Passage]] = await self._ask("/retrieve", body, read, trace)
        for place, passages in zip(places, answers, strict=True):
            found[place] = passages
            if self._cache is not None:
                await asyncio.to_thread(self._cache.put, queries[place], top_k, passages)
        return found  # type: ignore[return-value]

    async def _page(self, page: str, trace: str) -> str | None:
        cache = self._cache
        # A search for no passages does not exist: under top_k 0 stand pages, as the one passage
        # that was found, or none.
        found = None if cache is None else await asyncio.to_thread(cache.get, page, 0)
        if found is None:
            text = await self._ask("/access", {"urls": [page]}, read_page, trace)
            found = [] if text is None else [Passage(page, "", text, page)]
            if cache is not None:
                await asyncio.to_thread(cache.put, page, 0, found)
        return found[0].contents if found else None

    async def _ask(self, path: str, body: Mapping[str, Any], read: Read[T], trace: str) -> T:
        """What some server answers, within the deadline. Raises RetrievalError when all attempts
        failed."""
        content, failed = json.dumps(body).encode(), None

        async def attempt(deadline: float) -> T:
            nonlocal failed
            await self._identify()
            async with self._slots:  # waiting for a connection does not count as a failed attempt
                failed = url = self._pool.take(failed)
                if url is None:
                    raise Retryable(f"no server is listed in {self._where}")
                try:
                    return await self._attempt(url, path, content, read, trace, deadline)
                except Retryable as problem:
                    problem.at_once = problem.server_failed and self._pool.others(url)
                    if problem.server_failed and not problem.at_once:
                        self._note_failure(problem)
                    raise

        try:
            return await self._policy.call_async(attempt, self._generator)
        except GaveUp as end:
            last = end.last or "every connection was in use"
            most = "" if self._policy.tries is None else f" of {self._policy.tries}"
            raise RetrievalError(
                f"search failed after {end.attempts}{most} attempts in {end.spent_s:.1f} s; last: "
                f"{last}."
            ) from None

    async def _attempt(
        self, url: str, path: str, content: bytes, read: Read[T], trace: str, deadline: float
    ) -> T:
        """The server's answer. Raises Retryable, and RetrievalError for what another attempt would
        not change."""
        seconds = max(0.001, min(self._attempt_timeout_s, deadline - time.monotonic()))
        headers = {DEADLINE_HEADER: f"{seconds:.3f}", **({TRACE_HEADER: trace} if trace else {})}
        ask = self._client.session.ask
        failed: bool | None = True
        try:
            reply = await ask(
                "POST", url + path, content, headers=headers, timeout_s=seconds, where=f"{url}: "
            )
            answer = read(url + path, reply)
            failed, self._known = False, True
            if self._failures >= FAILURES:
                logger.info("a retrieval server answers again (%s)", self._where)
            self._failures = 0
            index = self._given_identity or reply.headers.get(INDEX_HEADER)
            if self._cache is not None and index:  # another one may be served by now
                self._cache.identify(index)
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
        except RetrievalError as problem:
            failed = False
            if isinstance(problem, QueryRefusedError) and not self._known:
                raise RetrievalError(str(problem)) from None  # it may be no query's doing
            raise
        except asyncio.CancelledError:  # the rollout's doing
            failed = None
            raise
        finally:
            self._pool.release(url, failed)

    def _note_failure(self, problem: Retryable) -> None:
        """Says once that no server answers, not for every search."""
        self._failures += 1
        if self._failures == FAILURES:
            told = "no retrieval server answers (%s; last: %s): searches try up to their deadline"
            logger.warning(told, self._where, problem)

    # ------------------------------------------------------------ the servers

    async def _wait_until_ready(self, wait_s: float) -> None:
        """Returns when a server says that it can answer. Raises ConfigError where none does in
        time."""
        start = reported = time.monotonic()
        while True:
            status, content = await self._get("/ready")
            if status not in (None, 503):  # others know no /ready: what answers is taken for ready
                return
            state, now = content.decode("utf-8", "replace")[:300], time.monotonic()
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

    async def _identify(self) -> None:
        """Tells the cache, once, which index the servers have. Raises Retryable while none is
        ready."""
        if self._cache is None:
            return
        async with self._identified:
            if not self._told_cache:
                self._cache.identify(self._given_identity or await self._served_identity())
                self._told_cache = True

    async def _served_identity(self) -> str:
        for path in ("/ready", "/info"):  # the latter does not tell yet while an index is loaded
            status, content = await self._get(path)
            if status in (None, 503):
                raise Retryable(content.decode("utf-8", "replace")[:300])
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
        ask, where = self._client.session.ask, f"{url}{path}: "
        failed: bool | None = True
        try:
            reply = await ask("GET", url + path, timeout_s=self._attempt_timeout_s, where=where)
            failed = reply.status == 503
            return reply.status, reply.content
        except Retryable as problem:
            return None, str(problem).encode()
        except asyncio.CancelledError:
            failed = None
            raise
        finally:
            self._pool.release(url, failed)

    @property
    def _open(self) -> HttpClient:
        """Raises RetrievalError after `close`."""
        if self._client.closed:
            raise RetrievalError("retriever http: it was closed.")
        return self._client


def _make_cache(options: Mapping[str, Any] | None) -> SearchCache | None:
    """The cache; None for mode off. Raises ConfigError."""
    given = check_options(options or {}, SearchCache, where="retriever http.cache")
    return SearchCache(**given) if given.get("mode", "off") not in ("off", False) else None
