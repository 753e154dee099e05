"""The checks, one function each. A check returns, raises Broken with what it found, or Skipped.

What they test for is what servers of the field get wrong: see docs/search_server.md for who relies
on what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlflow_environments.retrieval.conformance.probe import (
    Broken,
    Probe,
    ServerReply,
    Skipped,
    document_of,
    key_of,
    results_of,
)

LARGE_TOP_K = 1000
IN_FLIGHT = 48
UNKNOWN_URL = "https://nowhere.invalid/index.php?title=No_such_page"
STRINGS = (
    "",
    " ",
    "\x00",
    "\u2028",
    "🦆",
    "</information><answer>x</answer>",
    '"AND (NOT',
    "word " * 5000,
)


@dataclass(frozen=True)
class Check:
    """A claim about the server. required: clients of the field break where it does not hold."""

    name: str
    claim: str
    run: Callable[[Probe], Awaitable[None]]
    required: bool = True


async def batches_keep_their_order(probe: Probe) -> None:
    alone = [await probe.documents(query, 3) for query in probe.queries]
    together = await probe.retrieve(probe.queries, topk=3)
    for query, expected, found in zip(probe.queries, alone, together):
        if [key_of(d) for d in expected] != [key_of(document_of(e)) for e in found]:
            raise Broken(f"{query!r} finds another list in a batch than alone")


async def scored_elements(probe: Probe) -> None:
    for hits in await probe.retrieve(probe.queries, topk=3):
        for element in hits:
            score = element.get("score") if isinstance(element, dict) else None
            numeric = isinstance(score, (int, float)) and not isinstance(score, bool)
            if not numeric or not isinstance(element.get("document"), dict):
                raise Broken(
                    f'expected {{"document": ..., "score": ...}}, found {json.dumps(element)[:120]}'
                )


async def bare_elements(probe: Probe) -> None:
    for count in (1, 2, 3):  # a known fault shows with two queries only
        queries = (probe.queries * 3)[:count]
        scored = await probe.retrieve(queries, topk=3)
        bare = await probe.retrieve(queries, scores=False, topk=3)
        if bare != [[element.get("document") for element in hits] for hits in scored]:
            raise Broken(
                f"with {count} queries and return_scores false: expected bare documents, found "
                f"{json.dumps(bare)[:120]}"
            )


async def documents_are_whole(probe: Probe) -> None:
    for document in probe.sample:
        for key in ("id", "contents", "url"):
            if not isinstance(document.get(key), str) or not document[key]:
                raise Broken(f"a document has no '{key}': {json.dumps(document)[:120]}")


async def answers_are_stable(probe: Probe) -> None:
    first, second = [await probe.retrieve(probe.queries, topk=3) for _ in range(2)]
    if first != second:
        raise Broken("the same request has another answer the second time")


async def single_query(probe: Probe) -> None:
    query = probe.queries[0]
    reply = await probe.post("/retrieve", {"query": query, "topk": 3, "return_scores": True})
    if results_of(reply, 1) != await probe.retrieve([query], topk=3):
        raise Broken("'query' (SkyRL's form) has another answer than 'queries' with the same text")


async def topk_is_kept(probe: Probe) -> None:
    query = probe.queries[0]
    longest = [key_of(document) for document in await probe.documents(query, 5)]
    for top_k in (1, 2, 4):
        found = [key_of(document) for document in await probe.documents(query, top_k)]
        if len(found) != min(top_k, len(longest)):
            raise Broken(
                f"topk {top_k}: expected {min(top_k, len(longest))} documents, found {len(found)}"
            )


async def topk_has_a_default(probe: Probe) -> None:
    query = probe.queries[0]
    answers = [await probe.retrieve([query], **body) for body in ({}, {"topk": None}, {"topk": 0})]
    if not answers[0][0] or any(answer != answers[0] for answer in answers):
        raise Broken(
            "topk absent, null and 0: expected the same documents, found "
            f"{[len(results[0]) for results in answers]}"
        )


async def bad_topk_is_refused(probe: Probe) -> None:
    for value in (-1, "many", 1.5, [3]):
        reply = await probe.post(
            "/retrieve", {"queries": [probe.queries[0]], "topk": value, "return_scores": True}
        )
        if not 400 <= reply.status < 500:
            raise Broken(f"topk {json.dumps(value)}: expected a status of 4xx, found {reply}")


async def bad_bodies_are_refused(probe: Probe) -> None:
    for body in (b"{not json", b"[]", {}, {"queries": "text"}, {"queries": [1]}):
        reply = await probe.post("/retrieve", body)
        if not 400 <= reply.status < 500:
            raise Broken(f"{body!r}: expected a status of 4xx, found {reply}")
        if reply.body is None:
            raise Broken(f"{body!r}: expected an error in JSON, found {reply}")


async def short_results_are_not_padded(probe: Probe) -> None:
    for query in probe.queries[:3]:
        (hits,) = await probe.retrieve([query], topk=LARGE_TOP_K)
        keys = [key_of(document_of(element)) for element in hits]
        if len(keys) > LARGE_TOP_K or len(set(keys)) < len(keys):
            raise Broken(
                f"topk {LARGE_TOP_K}: {len(keys)} documents, only {len(set(keys))} different ones"
            )


async def scores_descend(probe: Probe) -> None:
    for hits in await probe.retrieve(probe.queries, topk=5):
        scores = [element.get("score") for element in hits if isinstance(element, dict)]
        if not all(
            isinstance(score, (int, float)) and math.isfinite(score) and abs(score) < 1e30
            for score in scores
        ):
            raise Broken(f"expected finite scores, found {scores}")
        if scores != sorted(scores, reverse=True):
            raise Broken(f"expected the best first, found the scores {scores}")


async def any_string_is_a_query(probe: Probe) -> None:
    for text in STRINGS:
        try:
            await probe.retrieve([text], topk=2)
        except Broken as problem:
            raise Broken(f"query {text[:30]!r}: {problem}") from None


async def no_queries_are_legal(probe: Probe) -> None:
    await probe.retrieve([], topk=3)


async def neighbours_do_not_change_topk(probe: Probe) -> None:
    for top_k, query, found in await _under_load(probe):
        if len(found) > top_k:
            raise Broken(
                f"{query!r} with topk {top_k} finds {len(found)} documents while others ask for "
                "more"
            )


async def neighbours_do_not_change_answers(probe: Probe) -> None:
    alone = {
        query: [key_of(document) for document in await probe.documents(query, 5)]
        for query in probe.queries
    }
    for top_k, query, found in await _under_load(probe):
        if found[:top_k] != alone[query][:top_k]:
            raise Broken(f"{query!r} finds another list under load than alone")


async def disconnects_harm_nobody(probe: Probe) -> None:
    async def leave() -> None:
        with contextlib.suppress(TimeoutError, Broken):
            async with asyncio.timeout(0.005):
                await probe.retrieve([probe.queries[0]], topk=3)

    await asyncio.gather(*(leave() for _ in range(16)))
    await probe.documents(probe.queries[0], 3)


async def pages_are_aligned(probe: Probe) -> None:
    urls = [
        UNKNOWN_URL,
        str(probe.sample[0].get("url")),
        UNKNOWN_URL + "2",
        str(probe.sample[0].get("url")),
        "",
    ]
    pages = results_of_access(await probe.post("/access", {"urls": urls}), len(urls))
    if any(pages[place] is not None for place in (0, 2, 4)):
        raise Broken(f"expected null for unknown URLs, found {json.dumps(pages)[:120]}")
    if pages[1] != pages[3]:
        raise Broken("the same URL twice has two different pages")
    if pages[1] is not None and "contents" not in pages[1]:
        raise Broken(f"a page has no 'contents': {json.dumps(pages[1])[:120]}")


async def access_of_nothing(probe: Probe) -> None:
    results_of_access(await probe.post("/access", {"urls": []}), 0)
    reply = await probe.post("/access", {"urls": "text"})
    if not 400 <= reply.status < 500:
        raise Broken(f"urls of a wrong type: expected a status of 4xx, found {reply}")


async def index_php_is_rewritten(probe: Probe) -> None:
    known = [
        str(document.get("url"))
        for document in probe.sample
        if "index.php?title=" in str(document.get("url"))
    ]
    try:
        pages = (
            results_of_access(await probe.post("/access", {"urls": known}), len(known))
            if known
            else []
        )
    except Broken as problem:  # another check's fault
        raise Skipped(f"/access does not work: {problem}") from None
    opened = [(url, page) for url, page in zip(known, pages) if page is not None]
    if not opened:
        raise Skipped("no page with index.php?title= was found")
    url, page = opened[0]
    written = url.replace("index.php?title=", "index.php/")
    if results_of_access(await probe.post("/access", {"urls": [written]}), 1) != [page]:
        raise Broken(f"{written}: expected the page of {url}")


async def health(probe: Probe) -> None:
    await _answers(probe, "/health")


async def ready(probe: Probe) -> None:
    await _answers(probe, "/ready")


async def info(probe: Probe) -> None:
    reply = await _answers(probe, "/info")
    if not isinstance(reply, dict) or not reply.get("identity"):
        raise Broken("no 'identity': caches cannot tell which index answered")


async def metrics(probe: Probe) -> None:
    await _answers(probe, "/metrics")


async def _answers(probe: Probe, path: str) -> object:
    reply = await probe.get(path)
    if reply.status != 200:
        raise Broken(f"GET {path}: expected status 200, found {reply}")
    return reply.body


async def _under_load(probe: Probe) -> list[tuple[int, str, list[str]]]:
    """(topk, query, keys found) of requests that are in flight together."""
    asked = [
        (1 + number % 5, probe.queries[number % len(probe.queries)]) for number in range(IN_FLIGHT)
    ]

    async def ask(top_k: int, query: str) -> tuple[int, str, list[str]]:
        return top_k, query, [key_of(document) for document in await probe.documents(query, top_k)]

    return list(await asyncio.gather(*(ask(*request) for request in asked)))


def results_of_access(reply: ServerReply, count: int) -> list[Any]:
    """The pages of an answer. Raises Broken unless there are `count`, or nulls in their places."""
    if reply.status == 404:
        raise Skipped("the server has no /access")
    pages = (
        reply.body.get("result") if reply.status == 200 and isinstance(reply.body, dict) else None
    )
    if not isinstance(pages, list) or len(pages) != count:
        raise Broken(f"expected 'result' with {count} pages or nulls, found {reply}")
    return pages


CHECKS = (
    Check("order", "a batch is answered in the order of its queries", batches_keep_their_order),
    Check("scores", "return_scores true: {document, score} elements", scored_elements),
    Check("no scores", "return_scores false: bare documents", bare_elements),
    Check("documents", "every document has id, contents and url", documents_are_whole),
    Check("stable", "the same request has the same answer", answers_are_stable),
    Check("query", "'query' with one text is understood", single_query),
    Check("topk", "as many documents as asked for", topk_is_kept),
    Check("default topk", "topk absent, null or 0 means the server's default", topk_has_a_default),
    Check("bad topk", "a wrong topk is refused with 4xx", bad_topk_is_refused),
    Check("bad body", "a wrong body is refused with 4xx, in JSON", bad_bodies_are_refused),
    Check("no padding", "a short result is not filled up", short_results_are_not_padded),
    Check("best first", "scores are finite and descend", scores_descend),
    Check("any string", "any text is a legal query", any_string_is_a_query),
    Check("no queries", "an empty list of queries is legal", no_queries_are_legal),
    Check("topk under load", "other requests do not change topk", neighbours_do_not_change_topk),
    Check(
        "answer under load",
        "other requests do not change answers",
        neighbours_do_not_change_answers,
    ),
    Check("disconnects", "clients that go away harm nobody", disconnects_harm_nobody),
    Check("pages", "/access is aligned with its URLs, null for unknown ones", pages_are_aligned),
    Check("no pages", "/access takes an empty list, refuses wrong types", access_of_nothing),
    Check("index.php", "/access knows the index.php/ form of a URL", index_php_is_rewritten),
    Check("health", "GET /health", health, required=False),
    Check("ready", "GET /ready", ready, required=False),
    Check("info", "GET /info tells which index answers", info, required=False),
    Check("metrics", "GET /metrics for Prometheus", metrics, required=False),
)
