"""A small HTTP server that answers as Qdrant's REST interface does, with faults on demand."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


@dataclass
class QdrantStub:
    """One collection `wiki`. key: the api key that is asked for. faults: status codes of the next answers, or a pause in
    seconds."""

    vectors: np.ndarray
    payloads: list[dict]
    key: str | None = None
    faults: list[float] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    vectors_config: object = None
    url: str = ""

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        if "/collections/wiki" not in path:
            return 404, {"status": {"error": "Not found: Collection doesn't exist!"}, "time": 0.0}
        if path.endswith("/points/query/batch"):
            return 200, [{"points": self.nearest(search)} for search in body["searches"]]
        if path.endswith("/points/count"):
            return 200, {"count": len(self.payloads)}
        if path.endswith("/points/scroll"):
            rows = range(min(body["limit"], len(self.payloads)))
            return 200, {
                "points": [self.point(row, vector=True) for row in rows],
                "next_page_offset": None,
            }
        if path.endswith("/points"):
            return 200, [self.point(row) for row in body["ids"] if row < len(self.payloads)]
        vectors = self.vectors_config or {"size": self.vectors.shape[1], "distance": "Cosine"}
        return 200, collection_info(vectors, len(self.payloads))

    def nearest(self, search: dict) -> list[dict]:
        scores = self.vectors @ np.asarray(search["query"]["nearest"], np.float32)
        rows = np.argsort(-scores, kind="stable")[: search["limit"]]
        return [{**self.point(int(row)), "version": 0, "score": float(scores[row])} for row in rows]

    def point(self, row: int, vector: bool = False) -> dict:
        return {
            "id": row,
            "payload": self.payloads[row],
            **({"vector": self.vectors[row].tolist()} if vector else {}),
        }


def collection_info(vectors: object, count: int) -> dict:
    hnsw = {
        "m": 32,
        "ef_construct": 512,
        "full_scan_threshold": 10000,
        "max_indexing_threads": 0,
        "on_disk": False,
    }
    optimizer = {
        "deleted_threshold": 0.2,
        "vacuum_min_vector_number": 1000,
        "default_segment_number": 0,
        "indexing_threshold": 20000,
        "flush_interval_sec": 5,
    }
    params = {
        "vectors": vectors,
        "shard_number": 1,
        "replication_factor": 1,
        "write_consistency_factor": 1,
        "on_disk_payload": True,
    }
    config = {
        "params": params,
        "hnsw_config": hnsw,
        "optimizer_config": optimizer,
        "wal_config": {"wal_capacity_mb": 32, "wal_segments_ahead": 0},
    }
    return {
        "status": "green",
        "optimizer_status": "ok",
        "indexed_vectors_count": count,
        "points_count": count,
        "segments_count": 1,
        "config": config,
        "payload_schema": {},
    }


@contextlib.contextmanager
def serving(stub: QdrantStub) -> Iterator[QdrantStub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            stub.requests.append(f"{self.command} {self.path}")
            stub.bodies.append(body)
            status, result = self.verdict(body)
            data = json.dumps(
                {"result": result, "status": "ok", "time": 0.0} if status == 200 else result
            ).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that timed out is gone
                self.wfile.write(data)

        do_POST = do_PUT = do_GET

        def verdict(self, body: dict) -> tuple[int, object]:
            if stub.key is not None and self.headers.get("api-key") != stub.key:
                return 401, {"status": {"error": "Must provide an API key"}, "time": 0.0}
            fault = stub.faults.pop(0) if stub.faults else 0
            if fault >= 100:
                return int(fault), {"status": {"error": "injected"}, "time": 0.0}
            time.sleep(fault)
            return stub.answer(self.path.partition("?")[0], body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
