"""What is asked of a server, and what its answer means to a client: passages or a page, another
attempt, or an end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlflow.http import check_status
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.retrieval.errors import RetrievalError

T = TypeVar("T")


@dataclass(frozen=True)
class SearchRequest(Generic[T]):
    """A POST to a retrieval server.

    read: (server's URL, status, headers, body) -> what was asked for; raises as `read_answer` does.
    """

    path: str
    body: bytes
    read: Callable[[str, int, Mapping[str, str], bytes], T]


def search_request(queries: Sequence[str], top_k: int) -> SearchRequest[list[list[Passage]]]:
    """The request for the passages of every query."""

    def read(
        url: str, status: int, headers: Mapping[str, str], content: bytes
    ) -> list[list[Passage]]:
        return read_answer(url, status, headers, content, queries, top_k)

    body = json.dumps({"queries": list(queries), "topk": top_k, "return_scores": True}).encode()
    return SearchRequest("/retrieve", body, read)


def page_request(page: str) -> SearchRequest[str | None]:
    """The request for the text of a page, given by its URL; None for an unknown one."""

    def read(url: str, status: int, headers: Mapping[str, str], content: bytes) -> str | None:
        results = _results(f"{url}/access", status, headers, content, 1)
        found = results[0]
        text = found.get("contents") if isinstance(found, dict) else None
        if found is not None and not isinstance(text, str):
            raise RetrievalError(
                f"{url}/access: expected a page with 'contents' or null, found "
                f"{json.dumps(found)[:200]}"
            )
        return text

    return SearchRequest("/access", json.dumps({"urls": [page]}).encode(), read)


class NotASearchServer(Exception):
    """Something answers there, but not a retrieval server."""


def read_answer(
    url: str,
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    queries: Sequence[str],
    top_k: int,
) -> list[list[Passage]]:
    """The passages of every query, at most `top_k` each, in order.

    Raises Retryable (429 and 5xx), NotASearchServer (what a wrong address answers), RetrievalError
    (any other refusal, and an answer that does not fit the queries)."""
    results = _results(f"{url}/retrieve", status, headers, content, len(queries))
    return [_passages(url, result)[:top_k] for result in results]


def _results(
    endpoint: str, status: int, headers: Mapping[str, str], content: bytes, count: int
) -> list[Any]:
    """The elements of the answer's `result`. Raises as `read_answer` does."""
    check_status(f"{endpoint}: ", status, headers, _excerpt(content))
    if status in (301, 302, 307, 308, 401, 403, 404, 405):
        raise NotASearchServer(f"{endpoint} answers with status {status}: {_excerpt(content)}")
    if status != 200:
        raise RetrievalError(f"{endpoint}: status {status}: {_excerpt(content)}")
    try:
        answer = load_json(content)
    except (ValueError, RecursionError):
        raise NotASearchServer(
            f"{endpoint} does not answer with JSON: {_excerpt(content)}"
        ) from None
    results = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != count:
        raise RetrievalError(
            f"{endpoint}: expected 'result' with {count} elements, found {_excerpt(content)}"
        )
    return results


def _passages(url: str, result: Any) -> list[Passage]:
    if not isinstance(result, list):
        raise RetrievalError(
            f"{url}: expected a list of documents per query, found {json.dumps(result)[:200]}"
        )
    return [_passage(url, element) for element in result]


def _passage(url: str, element: Any) -> Passage:
    """The passage of {document, score}, or of a bare document, which has no score."""
    scored = isinstance(element, dict) and "document" in element
    document = element["document"] if scored else element
    if not isinstance(document, dict):
        raise RetrievalError(f"{url}: expected a document, found {json.dumps(document)[:200]}")
    contents = document.get("contents")
    if contents is None and document.get("text") is not None:
        contents = make_contents(str(document.get("title") or ""), str(document["text"]))
    if not isinstance(contents, str):
        raise RetrievalError(f"{url}: a document has no 'contents': {json.dumps(document)[:200]}")
    title = document.get("title") or contents.partition("\n")[0].strip().strip('"')
    name = str(document.get("id", ""))
    score = element.get("score") if scored else None
    return Passage(
        name, str(title), contents, str(document.get("url") or f"doc://{name}"), float(score or 0.0)
    )


def _excerpt(content: bytes) -> str:
    """The beginning of a body; in it the `detail` of an error, where it has one."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        detail = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError):
        return text[:200]
    return str(detail)[:200]
