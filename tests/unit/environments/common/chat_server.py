"""A small server in the form of an OpenAI-compatible endpoint, whose n-th answer is given by a script."""

from __future__ import annotations

import asyncio
import json


class ChatServer:
    """Answers the n-th request by the script's n-th step: a reply, a status, or a whole body; afterwards with `reply`.

    delay_s: before every answer. most_in_flight: requests that were open at the same time.
    """

    def __init__(
        self, *script: str | int | bytes, reply: str = "fine", delay_s: float = 0.0
    ) -> None:
        self.script = list(script)
        self.reply = reply
        self.delay_s = delay_s
        self.requests: list[tuple[str, dict, dict]] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, scope, receive, send) -> None:
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.requests.append((scope["path"], json.loads((await receive())["body"]), headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.delay_s)
        self.in_flight -= 1
        step = self.script.pop(0) if self.script else self.reply
        status = step if isinstance(step, int) else 200
        body = (
            step
            if isinstance(step, bytes)
            else b"busy"
            if isinstance(step, int)
            else completion(step)
        )
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"0.01")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def completion(text: str | None, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}]}).encode()
