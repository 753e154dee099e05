"""The wire format as pure functions: bodies of requests read, bodies of answers written. No
framework, no copies.

The contract is the one that Search-R1, RLinf, ASearcher, AstraFlow, verl, slime and SkyRL share
(see docs/search_server.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson

from rlflow_environments.retrieval.records import load_record

Hit = tuple[bytes, float]
"""A document as JSON, and its score."""


MAX_QUERIES = 8192
MAX_TEXT = 262_144
"""Characters of one query or URL: a longer one would hold up the searches of all others."""
MAX_TEXTS = 1 << 22
"""Characters of all queries or URLs of a request together."""


class NotServed(Exception):
    """Why a request is not served, with the status that says so, and after how many seconds it may
    be."""

    def __init__(self, text: str, status: int = 422, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True)
class RetrieveRequest:
    """What `POST /retrieve` asks for. top_k: None for the server's default."""

    queries: list[str]
    top_k: int | None
    return_scores: bool


def read_retrieve(body: bytes) -> RetrieveRequest:
    """The request of a `POST /retrieve`. Keys that are not known are ignored. Raises NotServed for
    wrong types and values."""
    message = read_object(body)
    queries, query = message.get("queries"), message.get("query")
    if queries is None and query is None:
        raise NotServed("expected 'queries', a list of texts, or 'query', a text; found neither.")
    if queries is None and not isinstance(query, str):
        raise NotServed(f"query: expected a text, found {_shown(query)}.")
    queries = [query] if queries is None else queries  # SkyRL's form
    _check_texts("queries", queries)
    scores = message.get("return_scores")
    if scores is not None and not isinstance(scores, bool):
        raise NotServed(f"return_scores: expected true or false, found {_shown(scores)}.")
    return RetrieveRequest(queries, _top_k(message.get("topk")), bool(scores))


def read_access(body: bytes) -> list[str]:
    """The URLs of a `POST /access`. Raises NotServed."""
    urls = read_object(body).get("urls")
    if urls is None:
        raise NotServed("urls: expected a list of texts, found nothing.")
    _check_texts("urls", urls)
    return urls


def write_results(results: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """The body of an answer: per query, in order, its documents, or {document, score} pairs."""
    element = _scored if return_scores else itemgetter(0)
    lists = (b"[%b]" % b",".join(map(element, hits)) for hits in results)
    return b'{"result":[%b]}' % b",".join(lists)


def write_pages(pages: Sequence[bytes | None]) -> bytes:
    """The body of an answer to `POST /access`: a page per URL, in order, null for an unknown
    one."""
    return b'{"result":[%b]}' % b",".join(b"null" if page is None else page for page in pages)


def write_error(text: str) -> bytes:
    """The body of every answer that is no result: {"detail": text}."""
    return orjson.dumps({"detail": text.encode("utf-8", "replace").decode()})


def _scored(hit: Hit) -> bytes:
    score = repr(hit[1]).encode() if math.isfinite(hit[1]) else b"null"
    return b'{"document":%b,"score":%b}' % (hit[0], score)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises NotServed."""
    try:  # a sampled query may hold half a surrogate pair, which orjson refuses
        message = load_record(body)
    except (ValueError, RecursionError) as problem:
        raise NotServed(f"the body is not JSON that is read here: {str(problem)[:200]}.") from None
    if not isinstance(message, dict):
        raise NotServed(f"expected a JSON object, found {_shown(message)}.")
    return message


def _check_texts(key: str, values: Any) -> None:
    if not isinstance(values, list):
        raise NotServed(f"{key}: expected a list of texts, found {_shown(values)}.")
    if len(values) > MAX_QUERIES:
        raise NotServed(
            f"{key}: at most {MAX_QUERIES} in one request, found {len(values)}.", status=413
        )
    total = 0
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise NotServed(f"{key}[{place}]: expected a text, found {_shown(value)}.")
        if len(value) > MAX_TEXT:
            raise NotServed(
                f"{key}[{place}]: at most {MAX_TEXT} characters, found {len(value)}.", status=413
            )
        total += len(value)
    if total > MAX_TEXTS:
        raise NotServed(
            f"{key}: at most {MAX_TEXTS} characters in one request, found {total}.", status=413
        )


def _top_k(value: Any) -> int | None:
    """None for the server's default: what null, 0 and an absent key mean in the field."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise NotServed(
            "topk: expected a whole number, 0 or null (the server's default), found "
            f"{_shown(value)}."
        )
    if value < 0:
        raise NotServed(f"topk: expected 0 or more, found {_shown(value)}.")
    return int(value) or None


def _shown(value: Any) -> str:
    """A value as a message shows it: JSON, cut."""
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
