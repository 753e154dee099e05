"""What a server's answer means to a client: passages, another attempt, or an end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow_environments.search.errors import RetrievalError
from rlflow_environments.search.formats import Passage, make_contents

LONGEST_RETRY_AFTER_S = 30.0


class Retryable(Exception):
    """An attempt that failed in a way that may pass. server_failed: the server should rest while others are asked."""

    def __init__(self, text: str, *, server_failed: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.server_failed = server_failed
        self.retry_after_s = retry_after_s


class NotASearchServer(Exception):
    """Something answers there, but not a retrieval server."""


def read_answer(
    url: str, status: int, headers: Mapping[str, str], content: bytes, queries: Sequence[str], top_k: int
) -> list[list[Passage]]:
    """The passages of every query, at most `top_k` each, in order.

    Raises Retryable (429 and 5xx), NotASearchServer (what a wrong address answers), RetrievalError (any other refusal, and an
    answer that does not fit the queries).
    """
    if status == 429 or status >= 500:
        wait = _seconds(headers.get("retry-after", ""))
        raise Retryable(f"{url}: status {status}: {_excerpt(content)}", server_failed=status != 429, retry_after_s=wait)
    if status in (301, 302, 307, 308, 401, 403, 404, 405):
        raise NotASearchServer(f"{url}/retrieve answers with status {status}: {_excerpt(content)}")
    if status != 200:
        raise RetrievalError(f"{url}: status {status}: {_excerpt(content)}")
    try:
        answer = json.loads(content)
    except ValueError:
        raise NotASearchServer(f"{url}/retrieve does not answer with JSON: {_excerpt(content)}") from None
    results = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != len(queries):
        raise RetrievalError(f"{url}: expected 'result' with {len(queries)} lists of documents, found {_excerpt(content)}")
    return [_passages(url, result)[:top_k] for result in results]


def _passages(url: str, result: Any) -> list[Passage]:
    if not isinstance(result, list):
        raise RetrievalError(f"{url}: expected a list of documents per query, found {json.dumps(result)[:200]}")
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
    return Passage(name, str(title), contents, str(document.get("url") or f"doc://{name}"), float(score or 0.0))


def _excerpt(content: bytes) -> str:
    """The beginning of a body; in it the `detail` of an error, where it has one."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        detail = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError):
        return text[:200]
    return str(detail)[:200]


def _seconds(text: str) -> float:
    """Retry-After in seconds; its other form, a date, counts as none."""
    try:
        return min(LONGEST_RETRY_AFTER_S, max(0.0, float(text)))
    except ValueError:
        return 0.0
