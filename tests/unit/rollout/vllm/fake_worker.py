"""A process that speaks the messages of `rlflow.rollout.vllm.worker`, without vLLM: a token each millisecond, by a hash of the
seed and the place; log-probs in proportion to the first number of `model.norm.weight`.

Options in `arguments`: `fault` is what goes wrong (see `FAULTS`)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from typing import Any

from rlflow_vllm.frames import LENGTH, encode, receive_async

STEP_S = 0.001
FAULTS = ("dies", "dies_at_start", "refuses", "hangs", "forgets_a_name", "garbage", "not_a_stop")


class FakeServer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.version = 0
        self.scale = 1.0
        self.paused = False
        self.updating = False
        self.aborted: set[int] = set()
        self.fault = ""
        self.vocab = 300
        self.tokenizer: Any = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while (message := await receive_async(self.reader)) is not None:
            if message["op"] == "generate":
                self.tasks.add(asyncio.create_task(self.answer(message)))
            else:
                await self.answer(message)

    async def answer(self, message: dict[str, Any]) -> None:
        try:
            reply = await getattr(self, message["op"])(message)
        except RuntimeError as error:
            reply = {"error": f"RuntimeError: {error}"}
        self.writer.write(encode({"call": message["call"], **(reply or {})}))

    async def start(self, job: dict[str, Any]) -> dict[str, Any]:
        self.fault, self.path = job["arguments"].get("fault", ""), job["model"]
        with open(f"{self.path}/config.json") as file:
            self.vocab = min(300, json.load(file)["vocab_size"])
        print("fake: the model is loaded", flush=True)
        if self.fault == "dies_at_start":
            print("ValueError: no such model\nbye", flush=True)
            os._exit(3)
        if self.fault == "refuses":
            raise RuntimeError("vLLM 0.1 has no AsyncLLM.pause_generation")
        return {"vllm": "fake", "max_tokens": job["max_tokens"]}

    async def generate(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.fault == "dies":
            print("torch.OutOfMemoryError: no memory", flush=True)
            os._exit(9)
        if os.environ.get("RLFLOW_FAKE_IS_KILLED"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "garbage":
            self.writer.write(LENGTH.pack(3) + b"xyz")
        tokens, versions, stop = [], [], ""
        key = str(message["tokens"][0]) if message["temperature"] == 0 else str(message["seed"])
        while not stop:
            if message["call"] in self.aborted:
                stop = "abort"
                break
            if not self.paused and not self.updating:
                place = len(message["tokens"]) + len(tokens)
                tokens.append(random.Random(f"{key}/{place}").randrange(3, self.vocab))
                versions.append(self.version)
                stop = self.ended(tokens, message)
            await asyncio.sleep(STEP_S)
        logprobs = [-self.scale * (1 + token / 1000) for token in tokens]
        stop = "error" if self.fault == "not_a_stop" else stop
        return {"tokens": tokens, "logprobs": logprobs, "versions": versions, "stop": stop, "cached": 0}

    def ended(self, tokens: list[int], message: dict[str, Any]) -> str:
        if tokens[-1] in message["stop_token_ids"]:
            return "stop"
        if message["stop"]:
            if self.tokenizer is None:
                from tokenizers import Tokenizer

                self.tokenizer = Tokenizer.from_file(f"{self.path}/tokenizer.json")
            text, prompt = self.tokenizer.decode(tokens), message["tokens"]
            if self.tokenizer.decode(prompt).endswith("\ufffd"):  # as vLLM 0.32 does
                text = self.tokenizer.decode(prompt + tokens)
            if any(string in text for string in message["stop"]):
                return "stop"
        return "length" if len(tokens) >= message["max_tokens"] else ""

    async def abort(self, message: dict[str, Any]) -> None:
        self.aborted |= set(message["calls"])

    async def pause(self, _: dict[str, Any]) -> None:
        self.paused = True

    async def resume(self, _: dict[str, Any]) -> None:
        self.paused = False

    async def begin_update(self, _: dict[str, Any]) -> None:
        if self.updating:
            raise RuntimeError("an update is under way")
        self.updating = self.paused = True

    async def update(self, message: dict[str, Any]) -> dict[str, Any]:
        with open(message["path"], "rb") as file:
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        entries.pop("__metadata__", None)
        if "model.norm.weight" in entries:
            (self.scale,) = struct.unpack_from(
                "<f", content, 8 + length + entries["model.norm.weight"]["data_offsets"][0]
            )
        names = sorted(entries)
        return {"names": [name for name in names if self.fault != "forgets_a_name" or "norm" not in name]}

    async def finish_update(self, message: dict[str, Any]) -> None:
        self.updating, self.version = False, message["version"]

    async def cancel_update(self, _: dict[str, Any]) -> None:
        self.updating = False


async def main() -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))
    await FakeServer(reader, writer).serve()
    if os.environ.get("RLFLOW_FAKE_LINGERS"):
        time.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
