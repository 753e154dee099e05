"""Rules in place of a language model that labels messages of NetHack, behind OpenAI's protocol.

python labeller.py PORT ERRORS      ERRORS: share of the messages whose label is wrong, for ever"""

from __future__ import annotations

import json
import re
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROGRESS = re.compile(
    "direction do you want to dig|use or apply|dig a (pit|hole)|digging downward|fall through"
)
MESSAGE = re.compile(r"shown the message (\".*\")\.\n")


def label(prompt: str, errors: float) -> str:
    """FOO for a message that tells of digging down, BAR for another one."""
    found = MESSAGE.search(prompt)
    message = json.loads(found[1]) if found else ""
    wrong = zlib.crc32(message.encode()) % 1000 < 1000 * errors
    return "By the rules. " + ("FOO" if bool(PROGRESS.search(message)) != wrong else "BAR")


def main() -> None:
    port, errors = int(sys.argv[1]), float(sys.argv[2])

    class Labels(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = label(asked["messages"][-1]["content"], errors)
            message = {"role": "assistant", "content": content}
            answer = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    ThreadingHTTPServer(("127.0.0.1", port), Labels).serve_forever()


if __name__ == "__main__":
    main()
