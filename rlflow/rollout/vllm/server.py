"""A vLLM that somebody serves (`vllm serve --enable-scale-out`), by URL: token ids in, token ids out, over HTTP.

The operations are those of `worker.VLLMServer`, by the routes of vLLM 0.32: `/inference/v1/generate` and `.../abort_requests`,
and with VLLM_SERVER_DEV_MODE=1 `/pause`, `/resume`, `/collective_rpc`, `/update_weight_version`, `/reset_prefix_cache`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import struct
import tempfile
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, RolloutError
from rlflow.http import CONNECT_S, Retryable, backoff_s
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.vllm.backend import Sent, VLLMBackend
from rlflow.rollout.vllm.routes import Refused, Routes
from rlflow.rollout.vllm.worker import sampling_arguments

logger = logging.getLogger(__name__)

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"  # that the server puts before a request's id
ABORT_AGAIN_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
REPORT_EVERY_S = 20.0
PROBE = {"max_tokens": 1, "logprobs": 4, "seed": 1, "ignore_eos": True, "detokenize": False}
TELLING = 0.05  # nats between tokens, from which on two temperatures can be told apart
HOW_TO = "vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"


class ServedVLLM(VLLMBackend):
    """The server at a URL. It goes on when this is closed.

    model: its name there; none: the only one. key: sent as a bearer token. weights_folder: seen by rlflow and the server under
    the same path; new weights lie there while they are loaded. connections: at a time. retry_s: how long a request that
    generates is sent again while nobody answers; whatever changes the server's state is sent once."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        key: str | None,
        weights_folder: Path | None,
        connections: int,
        retry_s: float,
    ) -> None:
        self._routes = Routes(url, key, connections)
        self.name = f"the vLLM server at {self._routes.url}"
        self._model, self._weights_folder, self._retry_s = model, weights_folder, retry_s
        self.serves: str | None = None
        self._numbers = itertools.count()
        self._own = uuid.uuid4().hex[:12]  # apart from those of others at the same server
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._versions: dict[str, int] = {}  # the server's name of a version -> ours
        self._update: Path | None = None
        self._development = False  # whether it can be paused
        self._paused = False
        self._closed = False
        self._thread = LoopThread("rlflow-vllm-server")

    @property
    def heard(self) -> float:  # type: ignore[override]
        """When the server last answered."""
        return self._routes.heard

    # --- the backend --------------------------------------------------------------------------------------------------

    def send(self, operation: str, **fields: Any) -> Sent:
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        if self._closed:
            future.set_exception(RolloutError(f"{self.name}: the connection was closed."))
        else:
            self._thread.start(self._answer(operation, {**fields, "call": number}, future))
        return Sent(number, future)

    def checked(self, operation: str, reply: dict[str, Any]) -> dict[str, Any]:
        return reply

    def last_words(self) -> str:
        return "it may hang, or be paused by somebody else"

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            self._thread.run(self._hang_up())
        self._thread.close()

    def wait_until_ready(self, limit_s: float) -> dict[str, Any]:
        return self._thread.run(self._check(limit_s))

    # --- what the server is -------------------------------------------------------------------------------------------

    async def _check(self, limit_s: float) -> dict[str, Any]:
        """Waits for the server, and finds out whether it is one that can be used."""
        await self._wait_for_health(limit_s)
        try:
            version = str((await self._routes.ask("GET", "/version"))["version"])
            listed = (await self._routes.ask("GET", "/v1/models"))["data"]
            served = self._chosen(listed)
            self._model, self.serves = served["id"], served.get("root")
            await self._check_generation()
            paused = await self._routes.ask("GET", "/is_paused", missing={"is_paused": None})
            self._development = paused["is_paused"] is not None
        except (Refused, Retryable, KeyError, TypeError) as error:
            if "EngineCore" in str(error):
                raise RolloutError(
                    f"{self.name}: vLLM's engine ended at the first token; its log says why. On a CPU with AMX "
                    "vLLM 0.32 does so in bfloat16: start it with --dtype float32."
                ) from None
            raise RolloutError(f"{self.name}: {error}; expected vLLM 0.32, started as `{HOW_TO}`.") from None
        if paused["is_paused"]:
            raise RolloutError(f"{self.name} is paused; resume it (POST /resume), or start it anew.")
        if self._weights_folder is not None and not self._development:
            raise RolloutError(
                f"{self.name} takes no weights: start it with VLLM_SERVER_DEV_MODE=1, or leave out weights_folder."
            )
        return {"vllm": version, "max_tokens": served.get("max_model_len") or 1 << 31}

    async def _wait_for_health(self, limit_s: float) -> None:
        start = told = time.monotonic()
        while True:
            try:
                await self._routes.ask("GET", "/health")
                return
            except Refused as error:
                raise RolloutError(f"{self.name}: {error}; is it a vLLM server?") from None
            except Retryable as error:
                now = time.monotonic()
                if now - start >= limit_s:
                    raise RolloutError(
                        f"{self.name} did not answer in {limit_s:g} s (rollout.engine.start_s): {error}. Start it as `{HOW_TO}`, "
                        "or correct rollout.engine.url."
                    ) from None
                if now - told >= REPORT_EVERY_S:
                    told = now
                    logger.warning("waiting for %s (%.0f s)", self.name, now - start)
                await asyncio.sleep(min(1.0, limit_s))

    def _chosen(self, listed: list[dict[str, Any]]) -> dict[str, Any]:
        found = [one for one in listed if self._model in (None, one["id"])]
        if len(found) != 1:
            names = ", ".join(str(one["id"]) for one in listed) or "none"
            raise RolloutError(
                f"{self.name}: rollout.engine.model: expected one of its models, found {self._model}; it has {names}."
            )
        return found[0]

    async def _check_generation(self) -> None:
        """Raises RolloutError where log-probs are not those at the sampling temperature: their distances must halve from
        temperature 1 to 2. Takes down the name of the version that is served."""
        for token in range(1, 9):
            one, two = [await self._told(token, temperature) for temperature in (1.0, 2.0)]
            # The sampled token takes the place of another one: only what both answers tell can be compared.
            both = sorted(one.keys() & two.keys(), key=lambda found: one[found])
            if both and (distance := one[both[-1]] - one[both[0]]) > TELLING:
                if abs((two[both[-1]] - two[both[0]]) / distance - 0.5) > 0.1:
                    raise RolloutError(
                        f"{self.name} tells log-probs at temperature 1 whatever the request's is; start it with --logprobs-mode "
                        "processed_logprobs."
                    )
                return

    async def _told(self, token: int, temperature: float) -> dict[int, float]:
        """Log-probs, nats, of a few of the most probable tokens, and of the one that was sampled."""
        body = {"token_ids": [token], "sampling_params": {**PROBE, "temperature": temperature}, "model": self._model}
        choice = (await self._routes.ask("POST", GENERATE, body))["choices"][0]
        self._versions.setdefault(choice["weight_versions"][0]["version"], 0)
        return {place["token_id"]: place["logprob"] for place in choice["logprobs"]["content"][0]["top_logprobs"]}

    # --- operations ---------------------------------------------------------------------------------------------------

    async def _answer(self, operation: str, message: dict[str, Any], future: Future[dict[str, Any]]) -> None:
        try:
            if operation == "generate":
                task = asyncio.current_task()
                assert task is not None
                self._tasks[message["call"]] = task
                reply = await self._generate(message)
            elif operation == "abort":
                await self._abort(message)
                reply = {}
            else:
                async with self._turn:
                    reply = await getattr(self, f"_do_{operation}")(message) or {}
        except RolloutError as error:
            future.set_exception(error)
        except (Refused, Retryable) as error:
            future.set_exception(RolloutError(f"{self.name}: {operation.replace('_', ' ')} failed: {error}"))
        except BaseException as error:  # whoever waits must hear of it
            future.set_exception(
                RolloutError(f"{self.name}: {operation.replace('_', ' ')}: {type(error).__name__} {error}".rstrip())
            )
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(reply)
        finally:
            self._tasks.pop(message["call"], None)

    async def _generate(self, message: dict[str, Any]) -> dict[str, Any]:
        """A completion. It is asked for again while nobody answers: its seed gives the same tokens, and each token says which
        weights it is of."""
        body = {
            "request_id": f"{self._own}-{message['call']}",
            "model": self._model,
            "token_ids": message["tokens"],
            "sampling_params": sampling_arguments(message),
            "cache_salt": f"rlflow-{message['salt']}",
        }
        generator, failures, since = random.Random(message["call"]), 0, 0.0
        while True:
            try:
                return self._completion(
                    await self._routes.ask("POST", GENERATE, body, limit_s=None), int(message["salt"])
                )
            except Retryable as failure:
                since = since or time.monotonic()
                failures += 1
                pause_s = failure.retry_after_s + generator.uniform(
                    0, backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures)
                )
                if time.monotonic() + pause_s - since > self._retry_s:
                    raise RolloutError(
                        f"{self.name}: no answer in {failures} attempts over {self._retry_s:g} s (rollout.engine.retry_s); last: "
                        f"{failure}."
                    ) from None
            await asyncio.sleep(pause_s)

    def _completion(self, answer: dict[str, Any], wanted: int) -> dict[str, Any]:
        """The worker's reply from the server's. Raises RolloutError where the tokens are of other weights than those that were
        loaded when they were asked for, or of later ones."""
        try:
            choice = answer["choices"][0]
            tokens = [int(token) for token in choice["token_ids"] or ()]
            places = (choice["logprobs"] or {}).get("content") or []
            logprobs = [float(place["logprob"]) for place, token in zip(places, tokens, strict=True)]
            names = [
                span["version"] for span in choice["weight_versions"] or () for _ in range(span["start"], span["end"])
            ]
            cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            stop = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RolloutError(f"{self.name} sent what is no completion ({type(error).__name__} {error}).") from None
        if len(names) != len(tokens):
            raise RolloutError(
                f"{self.name} told the versions of {len(names)} tokens out of {len(tokens)}; expected vLLM 0.32."
            )
        versions = [self._versions.get(name, -1) for name in names]
        if versions and min(versions) < wanted:
            found = names[versions.index(min(versions))]
            raise RolloutError(
                f"{self.name} sampled with weights '{found}' where version {wanted} or later was expected: it was started anew, "
                "or somebody else gave it weights. Start the run again with --resume."
            )
        return {"tokens": tokens, "logprobs": logprobs, "versions": versions, "stop": stop, "cached": cached}

    async def _abort(self, message: dict[str, Any]) -> None:
        """Ends requests, which answer with what they have; again while the server does not know one that has only just come."""
        tasks = [task for call in message["calls"] if (task := self._tasks.get(call)) is not None]
        names = [f"{ID_PREFIX}{self._own}-{call}" for call in message["calls"]]
        while tasks:
            with contextlib.suppress(Retryable):
                await self._routes.ask("POST", ABORT, {"request_ids": names})
            done, _ = await asyncio.wait(tasks, timeout=ABORT_AGAIN_S)
            tasks = [task for task in tasks if task not in done]

    async def _do_pause(self, _: dict[str, Any]) -> None:
        if not self._development:
            raise RolloutError(f"{self.name} cannot be paused: start it with VLLM_SERVER_DEV_MODE=1.")
        self._paused = True
        await self._routes.ask("POST", "/pause?mode=keep&clear_cache=false")

    async def _do_resume(self, _: dict[str, Any]) -> None:
        if self._paused:
            await self._routes.ask("POST", "/resume")
            self._paused = False

    async def _do_begin_update(self, _: dict[str, Any]) -> None:
        """Nothing is sampled from here on, and nothing computed with the old weights is kept."""
        if self._weights_folder is None:
            raise RolloutError(
                f"{self.name} keeps the weights that it has: name a folder that it and rlflow see, in "
                "rollout.engine.weights_folder."
            )
        self._paused = True
        await self._routes.ask("POST", "/pause?mode=keep&clear_cache=true")
        self._discard_update()
        self._update = Path(tempfile.mkdtemp(prefix="update-", dir=self._weights_folder))
        self._update.chmod(0o755)  # the server may be another user's

    async def _do_update(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keeps the tensors of a file for `finish_update`; returns their names, as they stand in it."""
        assert self._update is not None
        kept = self._update / f"model-{len(list(self._update.iterdir())):05}.safetensors"
        Path(message["path"]).rename(kept)
        return {"names": await asyncio.to_thread(tensor_names, kept)}

    async def _do_finish_update(self, message: dict[str, Any]) -> None:
        """Loads the new weights under their version; the server stays paused. Raises RolloutError where keys and values of the
        old ones are left."""
        assert self._update is not None
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._update)}}
        await self._routes.ask("POST", "/collective_rpc", reload)
        name = f"{self._own}-{message['version']}"
        await self._routes.ask("POST", "/update_weight_version", {"new_version": name})
        if not (await self._routes.ask("POST", "/reset_prefix_cache"))["success"]:
            raise RolloutError(
                f"{self.name}: the cache was not cleared: requests in flight hold keys and values of the old weights."
            )
        self._versions[name] = message["version"]
        self._discard_update()

    async def _do_cancel_update(self, _: dict[str, Any]) -> None:
        self._discard_update()

    def _discard_update(self) -> None:
        if self._update is not None:
            shutil.rmtree(self._update, ignore_errors=True)
            self._update = None

    async def _hang_up(self) -> None:
        """Lets the server go on as it was found: not paused, without requests of this."""
        self._discard_update()
        with contextlib.suppress(Refused, Retryable):
            if self._tasks:
                names = [f"{ID_PREFIX}{self._own}-{call}" for call in self._tasks]
                await self._routes.ask("POST", ABORT, {"request_ids": names}, limit_s=CONNECT_S)
            if self._paused:
                await self._routes.ask("POST", "/resume", limit_s=CONNECT_S)
        for task in list(self._tasks.values()):
            task.cancel()
        await self._routes.close()


def tensor_names(path: Path) -> list[str]:
    """Those of a safetensors file, from its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return [name for name in json.loads(file.read(length)) if name != "__metadata__"]


def check_folder(folder: str | None) -> Path | None:
    """The folder that weights are handed over in. Raises ConfigError where it cannot be written."""
    if folder is None:
        return None
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise ConfigError(
            f"rollout.engine.weights_folder: {path} cannot be written; name a folder that the server sees too."
        )
    return path
