"""What the tests of retrieval servers and clients share: a small corpus, and any ASGI application on a port of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from rlflow_environments.retrieval.server.addresses import bind
from rlflow_environments.retrieval.server.app import SearchApp
from rlflow_environments.retrieval.server.service import SearchService, ServiceLimits

TOWNS = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel", "Ivy", "Juniper")


def write_corpus(folder: Path, size: int = 60) -> Path:
    """A corpus whose every passage is found by its number; row 1 lacks a url, row 2 has title and text instead of contents."""
    rows: list[dict[str, Any]] = []
    for row in range(size):
        town = TOWNS[row % len(TOWNS)]
        text = f"{town} number{row} has a harbour and a market."
        url = f"https://w/index.php?title={town}_{row}"
        rows.append({"id": f"d{row}", "contents": f'"{town} {row}"\n{text}', "url": url, "n": row})
    del rows[1]["url"]
    rows[2] = {"title": "Cedar 2", "text": "Cedar number2 has a harbour and a market."}
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_pages(folder: Path) -> Path:
    """The pages of rows 0, 3 and 4 of the corpus."""
    rows = [
        {
            "url": f"https://w/index.php?title={TOWNS[row]}_{row}",
            "contents": f"page {row}",
            "n": row,
        }
        for row in (0, 3, 4)
    ]
    path = folder / "pages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """The URL of an ASGI application that runs in a thread."""
    listener = bind("127.0.0.1", port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def search_server(
    load: Any, *, top_k: int = 3, wait: bool = True, **options: Any
) -> Iterator[tuple[str, SearchService]]:
    """(URL, service) of our server over what `load` returns; ready, unless told not to wait for that."""
    service = SearchService(load, ServiceLimits(top_k=top_k, **options))
    app, started = SearchApp(service), threading.Event()

    async def entered(scope: Any, receive: Any, send: Any) -> None:
        if (
            not started.is_set()
        ):  # the first request is ours: it starts loading in the server's own loop
            started.set()
            loading = asyncio.ensure_future(service.load())
            if wait:
                await loading
        await app(scope, receive, send)

    with serving(entered) as url:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            answer.read()
        yield url, service
