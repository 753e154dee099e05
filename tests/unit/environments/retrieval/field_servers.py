"""Stand-ins that speak as the servers of Search-R1 and RLinf do, faults included: FastAPI, pydantic, and faiss' manners.

A handler that raises is answered with 500 by Starlette, and uvicorn then closes the connection without having said so."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from tests.unit.environments.retrieval.faulty_server import DOCUMENTS, TOWNS


class RetrieveBody(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class AccessBody(BaseModel):
    urls: list[str]


def faiss_like(query: str, top_k: int, documents: list[dict]) -> tuple[list[dict], list[float]]:
    """The documents of the rows that faiss finds: row -1, which is the last one, where there are fewer than top_k."""
    assert top_k > 0  # as faiss does
    words = query.lower().split()
    scores = [
        sum(word in document["contents"] for word in words) + (town in words)
        for document, town in zip(documents, TOWNS)
    ]
    rows = sorted(range(len(documents)), key=lambda row: -scores[row])[:top_k]
    padding = [-1] * (top_k - len(rows))
    return [documents[row] for row in rows + padding], [float(scores[row]) for row in rows] + [
        -3.4e38
    ] * len(padding)


def search_r1() -> FastAPI:
    """Its corpus has no url; it has no /access; without scores it unpacks one list as two."""
    app = FastAPI()
    documents = [{"id": document["id"], "contents": document["contents"]} for document in DOCUMENTS]

    def batch_search(queries: list[str], top_k: int, return_score: bool) -> Any:
        found = [faiss_like(query, top_k, documents) for query in queries]
        results, scores = [one[0] for one in found], [one[1] for one in found]
        return (results, scores) if return_score else results

    @app.post("/retrieve")
    def retrieve(request: RetrieveBody) -> Any:
        results, scores = batch_search(request.queries, request.topk or 3, request.return_scores)
        if not request.return_scores:
            return {"result": results}
        pairs = [zip(*both) for both in zip(results, scores)]
        return {
            "result": [
                [{"document": document, "score": score} for document, score in pair]
                for pair in pairs
            ]
        }

    return app


def rlinf() -> FastAPI:
    """The name of its configuration is bound again before it serves, so that the default of topk is gone; no pages are loaded."""
    app = FastAPI()
    config = object()

    @app.post("/retrieve")
    async def retrieve(request: RetrieveBody) -> Any:
        top_k = request.topk or config.retrieval_topk  # type: ignore[attr-defined]
        found = [faiss_like(query, top_k, DOCUMENTS) for query in request.queries]
        if not request.return_scores:
            return {"result": [documents for documents, _ in found]}
        return {"result": [[{"document": d, "score": s} for d, s in zip(*both)] for both in found]}

    @app.post("/access")
    async def access(request: AccessBody) -> Any:
        return {"result": page_store.access(request.urls)}  # type: ignore[name-defined]  # noqa: F821

    return app
