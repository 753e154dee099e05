"""A server with the routes of `vllm serve` 0.32 that rlflow uses, without vLLM: a token each millisecond, by a hash of the
seed and the place; log-probs in proportion to the first number of `model.norm.weight`, or those of `scores`.

`fault` is what is wrong with it: disabled, raw, undeveloped, paused, garbage, no_versions, keeps_cache, hangs."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from rlflow.rollout.event_loop import LoopThread

STEP_S = 0.001
LONGEST = 4096
DEVELOPMENT = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache")


class FakeServed:
    """Serves until `close`; `restart` forgets everything, `drops` answers that many requests to generate by hanging up.

    scores: log-probs of a row but its first token, at a temperature."""

    def __init__(
        self,
        path: Path,
        fault: str = "",
        key: str = "",
        scores: Callable[[Sequence[int], float], list[float]] | None = None,
    ) -> None:
        self.path, self.fault, self.key, self.scores, self.drops = path, fault, key, scores, 0
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.restart()
        self.paused = fault == "paused"
        self._tokenizer: Any = None
        self._thread = LoopThread("fake-server")
        self.url = self._thread.run(self._listen())

    def restart(self) -> None:
        self.label, self.scale, self.paused = "default", 1.0, False
        self.aborted: set[str] = set()

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.close()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked.append(path)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.fault == "undeveloped" and path in DEVELOPMENT:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else {}
        found = getattr(self, path.strip("/").replace("/", "_"), None)
        if found is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        reply = await found(body, request)
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def health(self, *_: Any) -> Any:
        return web.Response()

    async def version(self, *_: Any) -> Any:
        return {"version": "0.32.0"}

    async def v1_models(self, *_: Any) -> Any:
        return {"data": [{"id": "fake", "max_model_len": LONGEST, "root": str(self.path)}]}

    async def is_paused(self, *_: Any) -> Any:
        return {"is_paused": self.paused}

    # --- generation ---------------------------------------------------------------------------------------------------

    async def inference_v1_generate(self, body: dict[str, Any], request: web.Request) -> Any:
        if self.fault == "disabled":
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled. Restart with "
                                                           "--enable-scale-out"}}, status=403)  # fmt: skip
        sampling = body["sampling_params"]
        if sampling.get("logprobs") == 4:  # the check of log-probs
            return self._choice([9], [0.0], "length", 1.0 if self.fault == "raw" else sampling["temperature"])
        self.bodies.append(body)
        if self.drops:
            self.drops -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "garbage":
            return {"choices": [{"tokens": 3}]}
        tokens, names, stop = [], [], ""
        key = str(body["token_ids"][0]) if sampling["temperature"] == 0 else str(sampling["seed"])
        while not stop:
            if body["request_id"] in self.aborted:
                stop = "abort"
                break
            if not self.paused:
                place = len(body["token_ids"]) + len(tokens)
                tokens.append(random.Random(f"{key}/{place}").randrange(3, 300))
                names.append(self.label)
                stop = self._ended(tokens, sampling)
            await asyncio.sleep(STEP_S)
        logprobs = [-self.scale * (1 + token / 1000) for token in tokens]
        if self.scores is not None:
            logprobs = self.scores([*body["token_ids"], *tokens], sampling["temperature"])[-len(tokens) :]
        return self._choice(tokens, logprobs, stop, 1.0, names)

    def _choice(
        self, tokens: list[int], logprobs: list[float], stop: str, temperature: float, names: list[str] | None = None
    ) -> dict[str, Any]:
        names = names or [self.label] * len(tokens)
        spans = [{"version": name, "start": at, "end": at + 1} for at, name in enumerate(names)]
        # as vLLM does: an improbable sampled token takes the place of the last of the most probable ones
        ranks = (0, 1, 2, 3) if temperature == 1 else (20, 0, 1, 2)
        top = [{"token_id": 9 + rank, "logprob": -rank / temperature} for rank in ranks]
        content = [{"token_id": t, "logprob": p, "top_logprobs": top} for t, p in zip(tokens, logprobs)]
        spans = [] if self.fault == "no_versions" and len(tokens) > 1 else spans
        choice = {
            "token_ids": tokens,
            "finish_reason": stop,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return {"choices": [choice], "usage": {"prompt_tokens": 1}}

    def _ended(self, tokens: list[int], sampling: dict[str, Any]) -> str:
        if tokens[-1] in sampling["stop_token_ids"]:
            return "stop"
        if sampling["stop"]:
            self._tokenizer = self._tokenizer or Tokenizer.from_file(f"{self.path}/tokenizer.json")
            if any(string in self._tokenizer.decode(tokens) for string in sampling["stop"]):
                return "stop"
        return "length" if len(tokens) >= sampling["max_tokens"] else ""

    async def inference_v1_abort_requests(self, body: dict[str, Any], _: Any) -> Any:
        self.aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
        return web.Response()

    # --- development --------------------------------------------------------------------------------------------------

    async def pause(self, *_: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    async def resume(self, *_: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    async def collective_rpc(self, body: dict[str, Any], _: Any) -> Any:
        assert body["method"] == "reload_weights" and self.paused
        for path in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
            content = path.read_bytes()
            (length,) = struct.unpack("<Q", content[:8])
            entry = json.loads(content[8 : 8 + length]).get("model.norm.weight")
            if entry:
                (self.scale,) = struct.unpack_from("<f", content, 8 + length + entry["data_offsets"][0])
        return {"results": [None]}

    async def update_weight_version(self, body: dict[str, Any], _: Any) -> Any:
        self.label = body["new_version"]
        return {"success": True}

    async def reset_prefix_cache(self, *_: Any) -> Any:
        return {"success": self.fault != "keeps_cache"}
