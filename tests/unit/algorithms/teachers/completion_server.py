"""A completion server in the form of vLLM 0.32's answers, over a transformers model: what `ServerTeacher` is tested with.

Its answers have the keys of genuine ones (`prompt_logprobs`, and `logprobs` of an echoed prompt)."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch


@functools.cache
def loaded(path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(str(path))


class Model:
    """temperature: whether prompts are scored at the temperature that is asked for; vLLM does not. failures: how many requests
    are answered with 503 before. delay_s: of every answer. drop: the key that answers lack."""

    def __init__(
        self, path: Path, temperature: bool, failures: int, delay_s: float, drop: str, shift: int
    ) -> None:
        self.inner, self.tokenizer = loaded(path)
        self.closing = threading.Event()
        self.temperature, self.failures, self.delay_s, self.drop, self.shift = (
            temperature,
            failures,
            delay_s,
            drop,
            shift,
        )
        self.requests: list[dict[str, Any]] = []

    @torch.no_grad()
    def choice(self, index: int, row: list[int], body: dict[str, Any]) -> dict[str, Any]:
        logits = self.inner(torch.tensor([row])).logits[0, :-1]
        logprobs = (logits / (body["temperature"] if self.temperature else 1.0)).log_softmax(-1)
        count = body.get("prompt_logprobs", body.get("logprobs"))
        places: list[dict[int, tuple[float, int]]] = []
        for token, values in zip(row[1:], logprobs, strict=True):
            ids = [token, *values.topk(count).indices.tolist()]
            places.append(
                {
                    number: (float(values[number]), int((values > values[number]).sum()) + 1)
                    for number in ids
                }
            )
        answer: dict[str, Any] = {
            "index": index,
            "text": "",
            "logprobs": None,
            "prompt_logprobs": None,
        }
        if body.get("echo"):
            named = [
                {f"token_id:{number}": value for number, (value, _) in place.items()}
                for place in places
            ]
            answer["logprobs"] = {
                "tokens": [*(f"token_id:{token}" for token in row), "token_id:0"],
                "token_logprobs": [
                    None,
                    *(place[token][0] for token, place in zip(row[1:], places, strict=True)),
                    -1.0,
                ],
                "top_logprobs": [None, *named, {}],
            }
        else:
            answer["prompt_logprobs"] = [None, *(
                {
                    str(number): {"logprob": value, "rank": rank, "decoded_token": self.text(number)}
                    for number, (value, rank) in place.items()
                }
                for place in places
            )]  # fmt: skip
        answer.pop(self.drop, None)
        return answer

    def text(self, token: int) -> str:
        return self.tokenizer.decode([(token + self.shift) % len(self.tokenizer)])


@contextmanager
def serve(
    path: Path,
    temperature: bool = False,
    failures: int = 0,
    delay_s: float = 0.0,
    drop: str = "",
    shift: int = 0,
) -> Iterator[tuple[str, Model]]:
    """(address, model) while it serves."""
    model = Model(path, temperature, failures, delay_s, drop, shift)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.requests.append(body)
            model.closing.wait(model.delay_s)
            model.failures -= 1
            status = 503 if model.failures >= 0 else 404 if body["model"] != "teacher" else 200
            rows = body["prompt"] if status == 200 else []
            choices = [model.choice(index, row, body) for index, row in enumerate(rows)]
            content = json.dumps({"choices": choices[::-1]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", model
    finally:
        model.closing.set()
        server.shutdown()
        server.server_close()
