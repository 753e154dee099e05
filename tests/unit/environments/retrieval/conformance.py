"""Checks of a retrieval server against the wire format that clients of the field rely on: they test
for what servers of the field get wrong (docs/search_server.md)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlflow.net.http import Reply, Retryable, Session
from rlflow_environments.retrieval.client.servers import server_url

SEEDS = ("capital city", "history", "river", "first", "what is the name of the town", "water", "1")
"""Queries that find something in most corpora; what they find gives the queries of the checks."""
QUERIES, TITLE_CHARACTERS = 12, 80
LARGE_TOP_K, IN_FLIGHT = 1000, 48
UNKNOWN_URL = "https://nowhere.invalid/index.php?title=No_such_page"
STRINGS = (
    "",
    " ",
    "\x00",
    "\u2028",
    "🦆",
    "</information><answer>x</answer>",
    '"AND (NOT',
    "a " * 9999,
)
BAD_BODIES = (b"{not json", b"[]", {}, {"queries": "text"}, {"queries": [1]})

Document = dict[str, Any]


class Broken(Exception):
    """Why a check fails."""


class Skipped(Exception):
    """Why a check cannot be made on this server."""


def expect(holds: object, told: str) -> None:
    """Raises Broken unless something holds."""
    if not holds:
        raise Broken(told)


@dataclass
class Probe:
    """Asks the server. queries: such that find something; sample: documents that they found."""

    session: Session
    url: str
    queries: list[str] = field(default_factory=list)
    sample: list[Document] = field(default_factory=list)

    async def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """The reply to a JSON body, or to raw bytes. Raises Broken where there is none."""
        if not isinstance(body, bytes | None):
            body = json.dumps(body).encode()
        where = f"{method} {path}: "
        try:
            return await self.session.ask(method, self.url + path, body, where=where)
        except Retryable as problem:
            raise Broken(str(problem)) from None

    async def result(self, path: str, body: Any, count: int) -> list[Any]:
        """The elements of `result`. Raises Broken unless the answer has `count` of them."""
        reply = await self.ask("POST", path, body)
        expect(reply.status == 200, f"expected status 200, found {_shown(reply)}")
        found = _json(reply)
        found = found.get("result") if isinstance(found, dict) else None
        counted = isinstance(found, list) and len(found) == count
        expect(counted, f"expected 'result' with {count} elements, found {_shown(reply)}")
        return found  # type: ignore[return-value]

    async def retrieve(
        self, queries: Sequence[str], scores: bool = True, **body: Any
    ) -> list[list[Any]]:
        """A list of hits per query. Raises Broken."""
        asked = {"queries": list(queries), "return_scores": scores, **body}
        return await self.result("/retrieve", asked, len(queries))

    async def keys(self, query: str, top_k: int) -> list[str]:
        """The documents that a query finds, asked alone. Raises Broken."""
        (hits,) = await self.retrieve([query], topk=top_k)
        return [key_of(document_of(element)) for element in hits]

    async def pages(self, urls: Sequence[str]) -> list[Any]:
        """A page or null per URL. Raises Broken, Skipped."""
        if (await self.ask("POST", "/access", {"urls": []})).status == 404:
            raise Skipped("the server has no /access")
        return await self.result("/access", {"urls": list(urls)}, len(urls))

    async def is_refused(self, path: str, body: Any, what: str) -> Reply:
        """Raises Broken unless a body is answered with 4xx."""
        reply = await self.ask("POST", path, body)
        expect(
            400 <= reply.status < 500, f"{what}: expected a status of 4xx, found {_shown(reply)}"
        )
        return reply


def document_of(element: Any) -> Document:
    """The document of an element with or without a score. Raises Broken."""
    document = element.get("document", element) if isinstance(element, dict) else element
    expect(isinstance(document, dict), f"expected a document, found {json.dumps(element)[:160]}")
    return document


def key_of(document: Document) -> str:
    """What tells documents apart: the id, or all of it where there is none."""
    return str(document["id"]) if "id" in document else json.dumps(document, sort_keys=True)


def _json(reply: Reply) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def _shown(reply: Reply) -> str:
    return f"status {reply.status}: {reply.text[:160]}"


# ---------------------------------------------------------------- the checks


async def batches_keep_their_order(probe: Probe) -> None:
    together = await probe.retrieve(probe.queries, topk=3)
    for query, found in zip(probe.queries, together):
        same = await probe.keys(query, 3) == [key_of(document_of(element)) for element in found]
        expect(same, f"{query!r} finds another list in a batch than alone")


async def scored_elements(probe: Probe) -> None:
    for hits in await probe.retrieve(probe.queries, topk=3):
        for element in hits:
            score = element.get("score") if isinstance(element, dict) else None
            numeric = isinstance(score, (int, float)) and not isinstance(score, bool)
            told = f'expected {{"document": ..., "score": ...}}, found {json.dumps(element)[:120]}'
            expect(numeric and isinstance(element.get("document"), dict), told)


async def bare_elements(probe: Probe) -> None:
    for count in (1, 2, 3):  # a known fault shows with two queries only
        queries = (probe.queries * 3)[:count]
        scored = await probe.retrieve(queries, topk=3)
        bare = await probe.retrieve(queries, scores=False, topk=3)
        same = bare == [[element.get("document") for element in hits] for hits in scored]
        told = f"with {count} queries and return_scores false: expected bare documents, found "
        expect(same, told + json.dumps(bare)[:120])


async def documents_are_whole(probe: Probe) -> None:
    for document in probe.sample:
        for key in ("id", "contents", "url"):
            whole = isinstance(document.get(key), str) and document[key]
            expect(whole, f"a document has no '{key}': {json.dumps(document)[:120]}")


async def single_query(probe: Probe) -> None:
    query = probe.queries[0]
    asked = {"query": query, "topk": 3, "return_scores": True}
    same = await probe.result("/retrieve", asked, 1) == await probe.retrieve([query], topk=3)
    expect(same, "'query' (SkyRL's form) has another answer than 'queries' with the same text")


async def topk_is_kept(probe: Probe) -> None:
    query = probe.queries[0]
    most = len(await probe.keys(query, 5))
    for top_k in (1, 2, 4):
        found, wanted = len(await probe.keys(query, top_k)), min(top_k, most)
        expect(found == wanted, f"topk {top_k}: expected {wanted} documents, found {found}")


async def topk_has_a_default(probe: Probe) -> None:
    query, bodies = probe.queries[0], ({}, {"topk": None}, {"topk": 0})
    answers = [await probe.retrieve([query], **body) for body in bodies]
    same = answers[0][0] and all(answer == answers[0] for answer in answers)
    counts = [len(results[0]) for results in answers]
    expect(same, f"topk absent, null and 0: expected the same documents, found {counts}")


async def bad_topk_is_refused(probe: Probe) -> None:
    for value in (-1, "many", 1.5, [3]):
        body = {"queries": [probe.queries[0]], "topk": value, "return_scores": True}
        await probe.is_refused("/retrieve", body, f"topk {json.dumps(value)}")


async def bad_bodies_are_refused(probe: Probe) -> None:
    for body in BAD_BODIES:
        reply = await probe.is_refused("/retrieve", body, repr(body))
        expect(_json(reply), f"{body!r}: expected an error in JSON, found {_shown(reply)}")


async def short_results_are_not_padded(probe: Probe) -> None:
    for query in probe.queries[:3]:
        keys = await probe.keys(query, LARGE_TOP_K)
        told = f"topk {LARGE_TOP_K}: {len(keys)} documents, only {len(set(keys))} different ones"
        expect(len(set(keys)) == len(keys) <= LARGE_TOP_K, told)


async def scores_descend(probe: Probe) -> None:
    for hits in await probe.retrieve(probe.queries, topk=5):
        scores = [element.get("score") for element in hits if isinstance(element, dict)]
        finite = all(
            isinstance(score, (int, float)) and math.isfinite(score) and abs(score) < 1e30
            for score in scores
        )
        expect(finite, f"expected finite scores, found {scores}")
        best_first = scores == sorted(scores, reverse=True)
        expect(best_first, f"expected the best first, found the scores {scores}")


async def any_string_is_a_query(probe: Probe) -> None:
    for text in STRINGS:
        try:
            await probe.retrieve([text], topk=2)
        except Broken as problem:
            raise Broken(f"query {text[:30]!r}: {problem}") from None


async def no_queries_are_legal(probe: Probe) -> None:
    await probe.retrieve([], topk=3)


async def neighbours_change_nothing(probe: Probe, what: str) -> None:
    alone = {query: await probe.keys(query, 5) for query in probe.queries}
    asked = [(1 + place % 5, probe.queries[place % len(alone)]) for place in range(IN_FLIGHT)]
    found = await asyncio.gather(*(probe.keys(query, top_k) for top_k, query in asked))
    for (top_k, query), keys in zip(asked, found, strict=True):
        if what == "topk":
            told = f"{query!r} with topk {top_k} finds {len(keys)} documents while others ask"
            expect(len(keys) <= top_k, f"{told} for more")
        else:
            same = keys[:top_k] == alone[query][:top_k]
            expect(same, f"{query!r} finds another list under load than alone")


async def pages_are_aligned(probe: Probe) -> None:
    known = str(probe.sample[0].get("url"))
    pages = await probe.pages([UNKNOWN_URL, known, UNKNOWN_URL + "2", known, ""])
    nulls = all(pages[place] is None for place in (0, 2, 4))
    expect(nulls, f"expected null for unknown URLs, found {json.dumps(pages)[:120]}")
    expect(pages[1] == pages[3], "the same URL twice has two different pages")
    whole = pages[1] is None or "contents" in pages[1]
    expect(whole, f"a page has no 'contents': {json.dumps(pages[1])[:120]}")


async def access_of_nothing(probe: Probe) -> None:
    await probe.pages([])
    await probe.is_refused("/access", {"urls": "text"}, "urls of a wrong type")


async def index_php_is_rewritten(probe: Probe) -> None:
    urls = [str(document.get("url")) for document in probe.sample]
    urls = [url for url in urls if "index.php?title=" in url]
    try:
        pages = await probe.pages(urls) if urls else []
    except Broken as problem:  # another check's fault
        raise Skipped(f"/access does not work: {problem}") from None
    opened = [(url, page) for url, page in zip(urls, pages) if page is not None]
    if not opened:
        raise Skipped("no page with index.php?title= was found")
    url, page = opened[0]
    written = url.replace("index.php?title=", "index.php/")
    expect(await probe.pages([written]) == [page], f"{written}: expected the page of {url}")


async def answers(probe: Probe, path: str, key: str = "") -> None:
    reply = await probe.ask("GET", path)
    expect(reply.status == 200, f"GET {path}: expected status 200, found {_shown(reply)}")
    found = _json(reply)
    told = f"no '{key}': caches cannot tell which index answered"
    expect(not key or (isinstance(found, dict) and found.get(key)), told)


@dataclass(frozen=True)
class Check:
    """A claim about the server. run: raises Broken with what it found, or Skipped."""

    name: str
    claim: str
    run: Callable[[Probe], Awaitable[None]]


GETS = (
    ("health", "", ""),
    ("ready", "", ""),
    ("info", " tells which index answers", "identity"),
    ("metrics", " for Prometheus", ""),
)
CHECKS = (
    Check("order", "a batch is answered in the order of its queries", batches_keep_their_order),
    Check("scores", "return_scores true: {document, score} elements", scored_elements),
    Check("no scores", "return_scores false: bare documents", bare_elements),
    Check("documents", "every document has id, contents and url", documents_are_whole),
    Check("query", "'query' with one text is understood", single_query),
    Check("topk", "as many documents as asked for", topk_is_kept),
    Check("default topk", "topk absent, null or 0 means the server's default", topk_has_a_default),
    Check("bad topk", "a wrong topk is refused with 4xx", bad_topk_is_refused),
    Check("bad body", "a wrong body is refused with 4xx, in JSON", bad_bodies_are_refused),
    Check("no padding", "a short result is not filled up", short_results_are_not_padded),
    Check("best first", "scores are finite and descend", scores_descend),
    Check("any string", "any text is a legal query", any_string_is_a_query),
    Check("no queries", "an empty list of queries is legal", no_queries_are_legal),
    Check(
        "topk under load",
        "other requests do not change topk",
        partial(neighbours_change_nothing, what="topk"),
    ),
    Check(
        "answer under load",
        "other requests do not change answers",
        partial(neighbours_change_nothing, what="answers"),
    ),
    Check("pages", "/access is aligned with its URLs, null for unknown ones", pages_are_aligned),
    Check("no pages", "/access takes an empty list, refuses wrong types", access_of_nothing),
    Check("index.php", "/access knows the index.php/ form of a URL", index_php_is_rewritten),
    *(
        Check(name, f"GET /{name}{told}", partial(answers, path=f"/{name}", key=key))
        for name, told, key in GETS
    ),
)


# ---------------------------------------------------------------- running them


@dataclass(frozen=True)
class Verdict:
    """The result of a check. outcome: pass, fail or skip."""

    check: Check
    outcome: str
    reason: str = ""


def check_server(
    url: str,
    *,
    seeds: Sequence[str] = SEEDS,
    timeout_s: float = 60.0,
) -> list[Verdict]:
    """The verdicts of all checks, in order. seeds: queries to begin with. timeout_s: of one
    request.

    Raises Broken where the server does not answer a plain search at all."""

    async def check_all() -> list[Verdict]:
        # A connection per request: uvicorn closes one on which a request failed, and the check
        # after it would be blamed.
        session = Session(keepalive_s=0, timeout_s=timeout_s)
        try:
            probe = Probe(session, server_url(url))
            await _sample(probe, seeds)
            return [await _verdict(check, probe) for check in CHECKS]
        finally:
            await session.close()

    return asyncio.run(check_all())


async def _verdict(check: Check, probe: Probe) -> Verdict:
    try:
        await check.run(probe)
    except Broken as problem:
        return Verdict(check, "fail", str(problem))
    except Skipped as reason:
        return Verdict(check, "skip", str(reason))
    return Verdict(check, "pass")


async def _sample(probe: Probe, seeds: Sequence[str]) -> None:
    """Finds queries that find something: the seeds, then the first lines of what they find. Raises
    Broken."""
    found: dict[str, None] = {}
    for seed in seeds:
        (hits,) = await probe.retrieve([seed], topk=5)
        probe.sample += map(document_of, hits)
        lines = [str(document_of(hit).get("contents") or "").partition("\n")[0] for hit in hits]
        titles = [line.strip().strip('"')[:TITLE_CHARACTERS] for line in lines]
        found |= dict.fromkeys([seed, *titles] if hits else [])
    probe.queries = [query for query in found if query.strip()][:QUERIES]
    expect(probe.queries, f"finds nothing for any of {', '.join(map(repr, seeds))}")
