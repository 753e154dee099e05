"""A retriever that echoes its queries, a server over it, and requests."""

from __future__ import annotations

import functools
import threading

import httpx

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.retrieval.server.index import ServedIndex
from rlflow_environments.retrieval.server.service import SearchService
from tests.unit.environments.retrieval.search_servers import search_server


class Echo(Retriever):
    """Finds, for any query, top_k passages that name it; waits for `open`; "bad" fails, "" finds nothing."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.open = threading.Event()
        self.open.set()
        self.started = threading.Event()

    def search(self, queries, top_k):
        self.batches.append((list(queries), top_k))
        self.started.set()
        assert self.open.wait(20)
        if "bad" in queries:
            raise OSError("the index is gone")
        return [
            [
                Passage(f"{q}/{k}", q, f"about {q}", "", 1 / (k + 1))
                for k in range(top_k if q else 0)
            ]
            for q in queries
        ]


def echo_server(retriever=None, **options):
    settings = {
        key: options.pop(key)
        for key in ("max_batch", "max_waiting", "cache_bytes")
        if key in options
    }
    settings.setdefault("cache_bytes", 0)

    def load(changes, report, on_batch):
        return ServedIndex(retriever or Echo(), on_batch=on_batch, **settings)

    return search_server(load, **options)


@functools.cache
def client() -> httpx.Client:
    return httpx.Client(
        timeout=20
    )  # one for all tests: making one takes as long as a hundred requests


def post(url: str, path: str = "/retrieve", **body):
    return client().post(url + path, json=body)


def reload(url: str, service: SearchService, **changes):
    return client().post(
        url + "/admin/reload",
        json=changes,
        headers={"Authorization": f"Bearer {service.admin_token}"},
    )


def get(url: str):
    return client().get(url)
