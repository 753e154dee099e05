"""The server under test, as the checks see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.http import Retryable, Session

Document = dict[str, Any]


class Broken(Exception):
    """Why a check fails."""


class Skipped(Exception):
    """Why a check cannot be made on this server."""


@dataclass(frozen=True)
class ServerReply:
    """An answer. body: the parsed JSON, None where it is not JSON."""

    status: int
    body: Any
    text: str

    def __str__(self) -> str:
        return f"status {self.status}: {self.text[:160]}"


@dataclass
class Probe:
    """Asks the server. queries: such that find something; sample: documents that they found."""

    session: Session
    url: str
    queries: list[str] = field(default_factory=list)
    sample: list[Document] = field(default_factory=list)

    async def post(self, path: str, body: Any) -> ServerReply:
        """The reply to a JSON body, or to raw bytes. Raises Broken where there is none."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._ask("POST", path, content)

    async def get(self, path: str) -> ServerReply:
        """The reply to a GET. Raises Broken where there is none."""
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> ServerReply:
        try:
            reply = await self.session.ask(
                method, self.url + path, body, where=f"{method} {path}: "
            )
        except Retryable as problem:
            raise Broken(str(problem)) from None
        try:
            found = reply.json()
        except ValueError:
            found = None
        return ServerReply(reply.status, found, reply.text)

    async def retrieve(
        self, queries: Sequence[str], scores: bool = True, **body: Any
    ) -> list[list[Any]]:
        """The lists of `result`. Raises Broken unless there is one per query."""
        reply = await self.post(
            "/retrieve", {"queries": list(queries), "return_scores": scores, **body}
        )
        return results_of(reply, len(queries))

    async def documents(self, query: str, top_k: int) -> list[Document]:
        """What one query finds, asked alone. Raises Broken."""
        (hits,) = await self.retrieve([query], topk=top_k)
        return [document_of(element) for element in hits]


def results_of(reply: ServerReply, count: int) -> list[list[Any]]:
    """The lists of `result`. Raises Broken unless the reply holds `count` of them."""
    if reply.status != 200:
        raise Broken(f"expected status 200, found {reply}")
    results = reply.body.get("result") if isinstance(reply.body, dict) else None
    if (
        not isinstance(results, list)
        or len(results) != count
        or not all(isinstance(hits, list) for hits in results)
    ):
        raise Broken(f"expected 'result' with {count} lists, found {reply.text[:160]}")
    return results


def document_of(element: Any) -> Document:
    """The document of an element with or without a score. Raises Broken."""
    document = element.get("document", element) if isinstance(element, dict) else element
    if not isinstance(document, dict):
        raise Broken(f"expected a document, found {json.dumps(element)[:160]}")
    return document


def key_of(document: Document) -> str:
    """What tells documents apart: the id, or all of it where there is none."""
    return str(document["id"]) if "id" in document else json.dumps(document, sort_keys=True)
