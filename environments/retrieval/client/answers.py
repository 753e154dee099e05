"""Answers of retrieval servers as passages and pages."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rlflow.net.http import Reply
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import Passage, make_contents, title_of
from rlflow_environments.retrieval.errors import QueryRefusedError, RetrievalError

_OF_A_QUERY = (400, 413, 422)
_NOT_OURS = (301, 302, 307, 308, 401, 403, 404, 405)


class NotASearchServer(Exception):
    """Something answers there, but not a retrieval server."""


def read_passages(endpoint: str, reply: Reply, count: int, top_k: int) -> list[list[Passage]]:
    """The passages of each of `count` queries, at most `top_k` each, in order.

    Raises Retryable (429 and 5xx), NotASearchServer (what a wrong address answers),
    QueryRefusedError (400, 413, 422), RetrievalError (any other refusal, and an answer that does
    not fit the queries)."""
    found = []
    for hits in _results(endpoint, reply, count):
        if not isinstance(hits, list):
            raise _unexpected(endpoint, "a list of documents per query", hits)
        found.append([_passage(endpoint, element) for element in hits][:top_k])
    return found


def read_page(endpoint: str, reply: Reply) -> str | None:
    """The text of the one page that was asked for, None for an unknown one. Raises as
    `read_passages` does."""
    (page,) = _results(endpoint, reply, 1)
    text = page.get("contents") if isinstance(page, dict) else None
    if page is not None and not isinstance(text, str):
        raise _unexpected(endpoint, "a page with 'contents' or null", page)
    return text


def _results(endpoint: str, reply: Reply, count: int) -> list[Any]:
    """The elements of the answer's `result`."""
    told = _excerpt(reply.content)
    Reply(reply.status, reply.headers, told.encode()).checked(f"{endpoint}: ")
    if reply.status in _NOT_OURS:
        raise NotASearchServer(f"{endpoint} answers with status {reply.status}: {told}")
    if reply.status != 200:
        kind = QueryRefusedError if reply.status in _OF_A_QUERY else RetrievalError
        raise kind(f"{endpoint}: status {reply.status}: {told}")
    try:
        answer = load_json(reply.content)
    except (ValueError, RecursionError):
        raise NotASearchServer(f"{endpoint} does not answer with JSON: {told}") from None
    results = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != count:
        raise RetrievalError(f"{endpoint}: expected 'result' with {count} elements, found {told}")
    return results


def _passage(endpoint: str, element: Any) -> Passage:
    """The passage of {document, score}, or of a bare document, which has no score."""
    scored = isinstance(element, dict) and "document" in element
    document = element["document"] if scored else element
    if not isinstance(document, dict):
        raise _unexpected(endpoint, "a document", document)
    contents = document.get("contents")
    if contents is None and document.get("text") is not None:
        contents = make_contents(str(document.get("title") or ""), str(document["text"]))
    if not isinstance(contents, str):
        raise RetrievalError(f"{endpoint}: a document has no 'contents': {_short(document)}")
    title, name = document.get("title") or title_of(contents), str(document.get("id", ""))
    url = str(document.get("url") or f"doc://{name}")
    score = element.get("score") if scored else None
    try:
        return Passage(name, str(title), contents, url, float(score or 0.0))
    except (TypeError, ValueError, OverflowError):
        raise _unexpected(endpoint, "a number as 'score'", score) from None


def _unexpected(endpoint: str, expected: str, found: Any) -> RetrievalError:
    return RetrievalError(f"{endpoint}: expected {expected}, found {_short(found)}")


def _short(value: Any) -> str:
    return json.dumps(value)[:200]


def _excerpt(content: bytes) -> str:
    """The beginning of a body; in it the `detail` of an error, where it has one."""
    text = content[:2000].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["detail"])
    return text[:200]
