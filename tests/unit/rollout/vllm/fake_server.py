"""A server with the routes of `vllm serve` 0.32 that rlflow uses, without vLLM: a token each
millisecond, by a hash of the seed and the place; log-probs in proportion to the first number of
`model.norm.weight`, or those of `scores`.

`fault` is what is wrong with it: one of FAULTS. As a program it is what rlflow starts in place of
vLLM (`launch.PROGRAM`); a flag --fault of `arguments` names its fault then."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import pickle
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

STEP_S = 0.001
LONGEST = 4096
FAULTS = ("disabled", "raw", "undeveloped", "paused", "garbage", "no_versions", "keeps_cache",
          "hangs", "dies", "dies_at_start", "not_a_stop", "core_dies", "no_routes",
          "drops_cached_routes", "zeroes_cached_routes", "wild_routes")  # fmt: skip
DEVELOPMENT = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version",
               "/reset_prefix_cache")  # fmt: skip


class FakeServer:
    """The application. drops: so many requests to generate are answered by hanging up.

    scores: log-probs of a row but its first token, at a temperature."""

    def __init__(
        self,
        path: Path,
        fault: str = "",
        key: str = "",
        scores: Callable[[Sequence[int], float], list[float]] | None = None,
    ) -> None:
        self.path, self.fault, self.key, self.scores, self.drops = path, fault, key, scores, 0
        self.longest = LONGEST
        self.seen: set[tuple[int, ...]] = set()  # prompts whose keys and values are kept
        self.config = json.loads((path / "config.json").read_text())
        self.experts = int(
            self.config.get("num_experts") or self.config.get("num_local_experts") or 0
        )
        self.vocab = min(300, self.config["vocab_size"])
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.restart()
        self.paused = fault == "paused"
        self._tokenizer: Any = None
        self.app = web.Application(client_max_size=1 << 26)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    def restart(self) -> None:
        """Forgets everything."""
        self.label, self.scale, self.paused, self.updating = "default", 1.0, False, False
        self.asleep = False
        self.gpu = "GPU-0"
        self.told: dict[str, bytes] = {}  # what came through a GPU's memory
        self.aborted: set[str] = set()

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

    # --- what it is ---------------------------------------------------------------------------

    async def health(self, *_: Any) -> Any:
        return web.Response()

    async def version(self, *_: Any) -> Any:
        return {"version": "0.32.0"}

    async def v1_models(self, *_: Any) -> Any:
        told = {"id": "fake", "max_model_len": self.longest, "root": str(self.path)}
        return {"data": [told]}

    async def is_paused(self, *_: Any) -> Any:
        return {"is_paused": self.paused}

    # --- generation ---------------------------------------------------------------------------

    async def inference_v1_generate(self, body: dict[str, Any], request: web.Request) -> Any:
        if self.fault == "disabled":
            told = "Scale-out endpoints are disabled. Restart with --enable-scale-out"
            return web.json_response({"error": {"message": told}}, status=403)
        sampling = body["sampling_params"]
        if sampling.get("logprobs") == 4 and sampling["max_tokens"] == 1:  # the check of log-probs
            raw = self.fault == "raw"
            return self._choice([9], [0.0], "length", 1.0 if raw else sampling["temperature"])
        self.bodies.append(body)
        assert request.transport is not None
        if self.drops:
            self.drops -= 1
            request.transport.close()
            return web.Response()
        if self.fault == "dies":
            print("torch.OutOfMemoryError: no memory", flush=True)
            os._exit(9)
        if self.fault == "core_dies":  # as vLLM's server does when its engine has ended
            print("RuntimeError: Engine core died unexpectedly, no memory", flush=True)
            asyncio.get_running_loop().call_later(0.3, os._exit, 0)
            return web.json_response({"error": "EngineCore encountered an issue"}, status=500)
        if os.environ.get("RLFLOW_FAKE_IS_KILLED"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "garbage":
            return {"choices": [{"tokens": 3}]}
        tokens, names, stop = list[int](), list[str](), ""
        first = body["token_ids"][0]
        # Without a seed, every request draws others
        seed = id(body) if sampling["seed"] is None else sampling["seed"]
        key = str(first if sampling["temperature"] == 0 else seed)
        while not stop:
            if body.get("request_id") in self.aborted:
                stop = "abort"
                break
            if not (self.paused or self.asleep):
                place = len(body["token_ids"]) + len(tokens)
                tokens.append(random.Random(f"{key}/{place}").randrange(3, self.vocab))
                names.append(self.label)
                stop = self._ended(body["token_ids"], tokens, sampling)
            await asyncio.sleep(STEP_S)
        stop = "error" if self.fault == "not_a_stop" else stop
        logprobs = [-self.scale * (1 + token / 1000) for token in tokens]
        if self.scores is not None:
            row = [*body["token_ids"], *tokens]
            logprobs = self.scores(row, sampling["temperature"])[-len(tokens) :]
        answer = self._choice(tokens, logprobs, stop, 1.0, names)
        if self.experts and self.fault != "no_routes":
            answer["choices"][0]["routed_experts"] = self._routes(body["token_ids"], tokens)
        return answer

    def _routes(self, prompt: list[int], tokens: list[int]) -> str:
        """Two experts by each token's id, in each of the layers, but for the last token."""
        fed, known = [*prompt, *tokens][:-1], tuple(prompt) in self.seen
        self.seen.add(tuple(prompt))
        layers, experts = self.config["num_hidden_layers"], self.experts
        found = np.array([[[t % experts, (t + 1) % experts]] * layers for t in fed], np.uint8)
        if known and self.fault == "drops_cached_routes":
            found = found[len(prompt) - 1 :]
        if known and self.fault == "zeroes_cached_routes":
            found[: len(prompt) - 1] = 0
        file = io.BytesIO()
        np.save(file, found.astype("O" if self.fault == "wild_routes" else np.uint8))
        return base64.b64encode(file.getvalue()).decode()

    def _choice(
        self,
        tokens: list[int],
        logprobs: list[float],
        stop: str,
        temperature: float,
        names: list[str] | None = None,
    ) -> dict[str, Any]:
        names = names or [self.label] * len(tokens)
        spans = [{"version": name, "start": at, "end": at + 1} for at, name in enumerate(names)]
        # as vLLM does: an improbable sampled token takes the place of the last of the most probable
        ranks = (0, 1, 2, 3) if temperature == 1 else (20, 0, 1, 2)
        top = [{"token_id": 9 + rank, "logprob": -rank / temperature} for rank in ranks]
        content = [
            {"token_id": t, "logprob": p, "top_logprobs": top} for t, p in zip(tokens, logprobs)
        ]
        choice = {
            "token_ids": tokens,
            "finish_reason": stop,
            "logprobs": {"content": content},
            "weight_versions": [] if self.fault == "no_versions" and len(tokens) > 1 else spans,
        }
        return {"choices": [choice], "usage": {"prompt_tokens": 1}}

    def _ended(self, prompt: list[int], tokens: list[int], sampling: dict[str, Any]) -> str:
        if tokens[-1] in sampling.get("stop_token_ids", ()):
            return "stop"
        if sampling.get("stop"):
            if self._tokenizer is None:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(f"{self.path}/tokenizer.json")
            text = self._tokenizer.decode(tokens)
            if self._tokenizer.decode(prompt).endswith("\ufffd"):  # as vLLM 0.32 does
                text = self._tokenizer.decode(prompt + tokens)
            if any(string in text for string in sampling["stop"]):
                return "stop"
        return "length" if len(tokens) >= sampling["max_tokens"] else ""

    async def inference_v1_abort_requests(self, body: dict[str, Any], _: Any) -> Any:
        self.aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
        return web.Response()

    # --- development --------------------------------------------------------------------------

    async def pause(self, *_: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    async def resume(self, *_: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    async def sleep(self, *_: Any) -> Any:
        self.asleep = self.paused = True
        return {}

    async def wake_up(self, _: Any, request: web.Request) -> Any:
        if request.query["tags"] == "kv_cache":
            self.asleep = self.paused = False  # as vLLM does, it goes on by itself
        return {}

    async def collective_rpc(self, body: dict[str, Any], _: Any) -> Any:
        if body["method"] == "can_sleep":
            return {"results": ["True"]}
        if body["method"] == "used_bytes":
            return {"results": [str(0 if self.asleep else 1000)]}
        assert body["method"] == "reload_weights" and self.paused
        for path in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
            self._read(path)
        return {"results": [None]}

    async def update_weight_version(self, body: dict[str, Any], _: Any) -> Any:
        self.label = body["new_version"]
        return {"success": True}

    async def reset_prefix_cache(self, *_: Any) -> Any:
        return {"success": self.fault != "keeps_cache"}

    async def init_weight_transfer_engine(self, *_: Any) -> Any:
        return {}

    async def start_weight_update(self, *_: Any) -> Any:
        if self.updating or not self.paused:
            return web.json_response({"error": "an update is under way"}, status=500)
        self.updating = True
        return {}

    async def update_weights(self, body: dict[str, Any], _: Any) -> Any:
        info = body["update_info"]
        if "path" in info:
            self._read(Path(info["path"]))
        else:
            self._open(info)
        return {}

    async def finish_weight_update(self, body: dict[str, Any], _: Any) -> Any:
        self.updating, self.label = False, body["weight_version"] or self.label
        return {}

    def _open(self, info: dict[str, Any]) -> None:
        """Reads the memory of the GPU `self.gpu` (`tests/gpu_memory.py`)."""
        path, size, *_ = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))[self.gpu]
        content, start = Path(path).read_bytes()[:size], 0
        for name, dtype, length in zip(info["names"], info["dtype_names"], info["tensor_sizes"]):
            self.told[name] = content[start : start + length]
            if name == "model.norm.weight" and dtype == "float32":
                (self.scale,) = struct.unpack_from("<f", content, start)
            start += length

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entry = json.loads(content[8 : 8 + length]).get("model.norm.weight")
        if entry:
            start = 8 + length + entry["data_offsets"][0]
            (self.scale,) = struct.unpack_from("<f", content, start)


class FakeServed(FakeServer):
    """One at a URL, until `close`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from rlflow.rollout.event_loop import LoopThread

        super().__init__(*arguments, **options)
        self._thread = LoopThread("fake-server")
        self.url = self._thread.run(self._listen())

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.close()

    async def _listen(self) -> str:
        self._runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"


def main() -> None:
    """Serves at the socket of the flags, as `rlflow_vllm.start` does."""
    flags = json.loads(sys.argv[1])["always"]
    told = {name: value for name, value in zip(flags, [*flags[1:], ""]) if name.startswith("--")}
    fault = told.get("--fault", "")
    if fault == "dies_at_start":
        print("ValueError: no such model\nbye", flush=True)
        sys.exit(3)
    server = FakeServer(Path(told["--model"]), fault)
    server.longest = int(told["--max-model-len"])
    web.run_app(server.app, path=told["--uds"], print=None, shutdown_timeout=0.1)
    if os.environ.get("RLFLOW_FAKE_LINGERS"):
        time.sleep(60)


if __name__ == "__main__":
    main()
