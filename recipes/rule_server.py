"""A server in the form of an OpenAI-compatible endpoint that answers by rules, in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RuleServer:
    """POST /v1/chat/completions is answered with what `reply` makes of the last message.
    `requests`: answered so far. Once closed, it refuses connections and drops those that are open,
    as a process that was killed."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.requests = 0
        self._closed = False
        owner = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # header and body are two writes

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if owner._closed:
                    self.close_connection = True
                    return
                message = {"role": "assistant", "content": reply(body["messages"][-1]["content"])}
                answer = json.dumps({"choices": [{"message": message}]}).encode()
                owner.requests += 1
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Ends it; of no effect the second time."""
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> RuleServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
