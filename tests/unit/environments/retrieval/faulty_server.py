"""A retrieval server with the faults that servers of the field are known for, one or several at a time; right without any."""

from __future__ import annotations

import asyncio
import json
from typing import Any

TOWNS = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "ginkgo")
URL = "https://w/index.php?title={}"
DOCUMENTS = [
    {
        "id": str(row),
        "contents": f'"{town}"\nthe history of the river at {town}',
        "url": URL.format(town),
    }
    for row, town in enumerate(TOWNS)
]
PAGES = {
    document["url"]: {"url": document["url"], "contents": "page"} for document in DOCUMENTS[:3]
}

FAULTS = {
    # fault: (where it is known from, the checks that fail for it)
    "crashes without scores": (
        "Search-R1, verl: return_scores false unpacks a list",
        {"no scores"},
    ),
    "wrong without scores for two": ("the same, silently, with exactly two queries", {"no scores"}),
    "needs topk": (
        "RLinf, ASearcher, AstraFlow: the name `config` is bound twice",
        {"default topk"},
    ),
    "pads with the last document": ("FAISS returns row -1, and corpus[-1] exists", {"no padding"}),
    "coalesces with the largest topk": (
        "AstraFlow: merged jobs are never trimmed back",
        {"topk under load"},
    ),
    "mixes answers": ("a handler that keeps its request in a global", {"answer under load"}),
    "has no urls": ("the wiki-18 corpus as Search-R1 serves it", {"documents"}),
    "knows no query": ("all servers but SkyRL's", {"query"}),
    "reverses": ("results in the order of completion", {"order"}),
    "worst first": ("distances taken for similarities", {"best first"}),
    "crashes on bad topk": ("a negative k in FAISS", {"bad topk"}),
    "crashes on bad bodies": ("a body that is not checked", {"bad body"}),
    "answers errors in HTML": ("a proxy in front", {"bad body"}),
    "refuses the empty query": ("FlashRAG", {"any string"}),
    "refuses no queries": ("an encoder that is given no text", {"no queries"}),
    "crashes without pages": ("--pages_path not given: NameError", {"pages", "no pages"}),
    "drops unknown pages": ("a filter instead of nulls", {"pages"}),
    "does not rewrite": ("the index.php/ form", {"index.php"}),
}


class FaultyServer:
    """An ASGI application. Searches take a few milliseconds, so that requests meet each other."""

    def __init__(self, *faults: str) -> None:
        unknown = set(faults) - set(FAULTS)
        assert not unknown, unknown
        self.faults = set(faults)
        self._in_flight: list[int] = []
        self._latest: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status, answer = await self._answer(scope["path"], body)
        text = json.dumps(answer).encode()
        if status != 200 and "answers errors in HTML" in self.faults:
            text = b"<html>error</html>"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(text)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        crash = 500 if "crashes on bad bodies" in self.faults else 422
        if path in ("/health", "/ready", "/info", "/metrics"):
            return 200, {"identity": "towns"}
        if path not in ("/retrieve", "/access"):
            return 404, {"detail": "not found"}
        try:
            request = json.loads(body)
        except ValueError:
            return crash, {"detail": "not JSON"}
        if not isinstance(request, dict):
            return crash, {"detail": "not an object"}
        return self._access(request) if path == "/access" else await self._retrieve(request, crash)

    async def _retrieve(self, request: dict, crash: int) -> tuple[int, Any]:
        queries, top_k, scores = (
            request.get("queries"),
            request.get("topk"),
            bool(request.get("return_scores")),
        )
        if (
            queries is None
            and isinstance(request.get("query"), str)
            and "knows no query" not in self.faults
        ):
            queries = [request["query"]]
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return crash, {"detail": "queries"}
        if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
            return (500 if "crashes on bad topk" in self.faults else 422), {"detail": "topk"}
        if not top_k and "needs topk" in self.faults:
            return 500, {"detail": "config has no attribute topk"}
        if "refuses the empty query" in self.faults and "" in queries:
            return 400, {"detail": "empty query"}
        if "refuses no queries" in self.faults and not queries:
            return 500, {"detail": "no queries"}
        if "crashes without scores" in self.faults and not scores and queries:
            return 500, {"detail": "too many values to unpack"}
        return 200, {"result": await self._search(queries, top_k or 3, scores)}

    async def _search(self, queries: list[str], top_k: int, scores: bool) -> list[Any]:
        if "mixes answers" in self.faults:
            self._latest = queries
        self._in_flight.append(top_k)
        await asyncio.sleep(0.01)
        largest = max(self._in_flight)
        self._in_flight.remove(top_k)
        queries = (self._latest or queries)[: len(queries)]
        if "coalesces with the largest topk" in self.faults:
            top_k = largest
        results = [self._find(query, top_k) for query in queries]
        if "reverses" in self.faults:
            results.reverse()
        if not scores:
            if "wrong without scores for two" in self.faults and len(results) == 2:
                return list(results[0][:1]), list(results[1][:1])
            return [[element["document"] for element in hits] for hits in results]
        return results

    def _find(self, query: str, top_k: int) -> list[dict]:
        words = query.lower().split()
        rows = [
            row
            for row in range(len(DOCUMENTS))
            if any(word in DOCUMENTS[row]["contents"] for word in words)
        ]
        ranked = sorted(rows, key=lambda row: -(TOWNS[row] in words))
        chosen = ranked[:top_k]
        if "pads with the last document" in self.faults:
            chosen += [-1] * (top_k - len(chosen))
        hits = [
            {"document": dict(DOCUMENTS[row]), "score": 1.0 / (place + 1)}
            for place, row in enumerate(chosen)
        ]
        if "has no urls" in self.faults:
            for hit in hits:
                del hit["document"]["url"]
        if "worst first" in self.faults:
            for hit in hits:
                hit["score"] = 1 - hit["score"]
        return hits

    def _access(self, request: dict) -> tuple[int, Any]:
        if "crashes without pages" in self.faults:
            return 500, {"detail": "name 'pages' is not defined"}
        if not isinstance(request.get("urls"), list):
            return 422, {"detail": "urls"}
        rewritten = request["urls"]
        if "does not rewrite" not in self.faults:
            rewritten = [url.replace("index.php/", "index.php?title=") for url in rewritten]
        pages = [PAGES.get(url) for url in rewritten]
        if "drops unknown pages" in self.faults:
            pages = [page for page in pages if page is not None]
        return 200, {"result": pages}
