"""vLLM's AsyncLLM behind messages on a socket. Runs under the interpreter of vLLM, as the module `rlflow_vllm.vllm.worker`.

What is decided here is how vLLM is asked. Who may run when, and what a request that was ended counts as, is decided by `engine`,
on the other side of the socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..frames import encode, receive_async
from .transfer import BACKEND, WATCH

WINDOW = "vLLM 0.27 to 0.33"
PAUSE: dict[str, Any] = {"mode": "keep", "clear_cache": True}
"""How generation is paused for new weights: what runs stays, and is computed anew afterwards."""
LOGPROBS = "processed_logprobs"
"""Of the distribution that is sampled from. vLLM's default is that of temperature 1, whatever the request says."""
NEEDED = {
    "generate": ("priority",),
    "abort": (),
    "pause_generation": ("mode", "clear_cache"),
    "resume_generation": (),
    "reset_prefix_cache": (),
    "init_weight_transfer_engine": (),
    "start_weight_update": (),
    "update_weights": (),
    "finish_weight_update": ("weight_version",),
    "sleep": ("level", "mode"),
    "wake_up": ("tags",),
    "get_weight_version": (),
}
"""Methods of AsyncLLM and the parameters of theirs that are used."""
NEEDED_ARGUMENTS = ("logprobs_mode", "scheduling_policy", "weight_transfer_config", "enable_prefix_caching",
                    "enable_sleep_mode", "worker_extension_cls")  # fmt: skip
DISCARD = 2
"""vLLM's level of sleep that keeps no copy of the weights in the host's memory: new ones come before it wakes."""
ABORT_AGAIN_S = 0.05
STEP_TOKENS = 8192  # of prompts in a step, on a CPU
DEAD = 70  # exit code where vLLM's engine has ended by itself
PARENT_POLL_S = 1.0


class UnknownVersion(Exception):
    """This vLLM lacks something that is needed."""


def missing_features(engine_class: type, argument_names: Any) -> list[str]:
    """What is needed of vLLM and is not there, by signatures: a version says less."""
    missing = []
    for method, parameters in NEEDED.items():
        found = getattr(engine_class, method, None)
        if found is None:
            missing.append(f"AsyncLLM.{method}")
        else:
            known = inspect.signature(found).parameters
            missing += [f"AsyncLLM.{method}({name}=)" for name in parameters if name not in known]
    return missing + [f"AsyncEngineArgs.{name}" for name in NEEDED_ARGUMENTS if name not in argument_names]


def engine_arguments(job: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of AsyncEngineArgs."""
    return {
        "model": job["model"],
        "dtype": job["dtype"],
        "seed": job["seed"],
        "max_model_len": job["max_tokens"],
        "max_num_seqs": job["max_concurrency"],
        "tensor_parallel_size": job["tensor_parallel"],
        "trust_remote_code": job["trust_remote_code"],
        "enforce_eager": job["enforce_eager"],
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # not the model's: what is sampled is what the request says
        "logprobs_mode": LOGPROBS,
        "disable_log_stats": True,
        "worker_extension_cls": WATCH,
        **job["arguments"],
    }


def whole_prompts(job: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of AsyncEngineArgs by which a prompt is computed in one step. On a CPU a request with a seed ends vLLM (0.32) when
    its prompt is computed in parts: it wants the generator's offset back, which CPU generators have not."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(STEP_TOKENS, job["max_tokens"] or 0)}


def sampling_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of SamplingParams. Of end-of-sequence tokens vLLM knows those only that the request names."""
    return {
        "max_tokens": message["max_tokens"],
        "temperature": message["temperature"],
        "stop": message["stop"],
        "stop_token_ids": message["stop_token_ids"],
        "seed": message["seed"],
        "logprobs": 0,  # of the sampled token
        "ignore_eos": True,
        "detokenize": bool(message["stop"]),
        "include_stop_str_in_output": True,
    }


class VLLMServer:
    """Answers the messages of one connection until it ends. Each is a task of its own; changes of state are made in turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._engine: Any = None
        self._versions: dict[str, int] = {}  # vLLM's name of a version -> ours
        self._version = 0
        self._spans = True
        self._asleep, self._used = False, 0
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self.exit_code = 0

    async def serve(self) -> None:
        """Returns when the other side has closed the connection."""
        while (message := await receive_async(self._reader)) is not None:
            task = asyncio.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if message["op"] == "generate":
                self._requests[message["call"]] = task

    def shut_down(self) -> None:
        """Ends vLLM's processes."""
        if self._engine is not None:
            self._engine.shutdown()

    async def _answer(self, message: dict[str, Any]) -> None:
        try:
            operation = getattr(self, f"do_{message['op']}")
            if message["op"] in ("generate", "abort"):
                reply = await operation(message)
            else:
                async with self._turn:
                    reply = await operation(message)
        except Exception as error:  # noqa: BLE001 -- the process's boundary: it goes to who asked
            reply = {"error": " ".join(f"{type(error).__name__}: {_cause(error)}".split())[:2000]}
        self._requests.pop(message["call"], None)
        with contextlib.suppress(ConnectionError):
            if not self._writer.is_closing():
                self._writer.write(encode({"call": message["call"], **(reply or {})}))
                await self._writer.drain()
        if self._engine is not None and self._engine.errored:
            self.exit_code = DEAD
            self._writer.close()

    async def do_start(self, job: dict[str, Any]) -> dict[str, Any]:
        """Makes the engine. Raises UnknownVersion."""
        import vllm
        from vllm import AsyncEngineArgs, CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM

        names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        missing = missing_features(AsyncLLM, names)
        if missing:
            raise UnknownVersion(
                f"vLLM {vllm.__version__} in {sys.prefix} has no {', '.join(missing)}; expected {WINDOW}. Install one of these."
            )
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.platforms import current_platform

        shared = job.get("transfer") == "ipc"
        transfer = WeightTransferConfig(backend="ipc" if shared else BACKEND)
        init_info = {"packed": True} if shared else {}
        keywords = {**(whole_prompts(job) if current_platform.is_cpu() else {}), **engine_arguments(job)}
        sleeps = bool(job["sleep"]) and current_platform.is_sleep_mode_available()
        arguments = AsyncEngineArgs(**keywords, weight_transfer_config=transfer, enable_sleep_mode=sleeps)
        self._engine = AsyncLLM.from_engine_args(arguments)
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        self._versions[await self._engine.get_weight_version()] = 0
        self._spans = "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}
        await self._try_out()
        return {"vllm": vllm.__version__, "max_tokens": self._engine.model_config.max_model_len, "sleeps": sleeps}

    async def _try_out(self) -> None:
        """Samples a token: what vLLM cannot compute on this machine shows now."""
        message = {"call": -1, "tokens": [0], "max_tokens": 1, "temperature": 0.0, "stop": [], "stop_token_ids": [], "seed": 0}
        await self.do_generate({**message, "priority": 0, "salt": "first"})

    async def do_generate(self, message: dict[str, Any]) -> dict[str, Any]:
        """A completion: token ids, log-probs (nats), versions, why it ended, tokens of the prompt that were in the cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY if self._spans else RequestOutputKind.CUMULATIVE
        sampling = SamplingParams(**sampling_arguments(message), output_kind=kind)
        prompt = {"prompt_token_ids": message["tokens"], "cache_salt": message["salt"]}
        name, versions, output = str(message["call"]), list[int](), None
        async for output in self._engine.generate(prompt, sampling, name, priority=message["priority"]):
            versions += [self._version] * (len(output.outputs[0].token_ids) - len(versions))
        if output is None:
            raise RuntimeError("vLLM ended the request without an answer")
        completion = output.outputs[0]
        tokens = [int(token) for token in completion.token_ids]
        places = zip(completion.logprobs or [], tokens, strict=True)
        return {
            "tokens": tokens,
            "logprobs": [float(place[token].logprob) for place, token in places],
            "versions": self._spelled_out(completion.weight_versions, len(tokens)) if self._spans else versions,
            "stop": str(completion.finish_reason),
            "cached": int(output.num_cached_tokens or 0),
        }

    async def do_abort(self, message: dict[str, Any]) -> None:
        """Ends requests, which answer with what they have."""
        tasks = [task for call in message["calls"] if (task := self._requests.get(call)) is not None]
        names = [str(call) for call in message["calls"]]
        while tasks:  # again: vLLM does not know a request yet that has only just come
            await self._engine.abort(names)
            done, _ = await asyncio.wait(tasks, timeout=ABORT_AGAIN_S)
            tasks = [task for task in tasks if task not in done]

    async def do_pause(self, _: dict[str, Any]) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def do_resume(self, _: dict[str, Any]) -> None:
        await self._engine.resume_generation()

    async def do_sleep(self, _: dict[str, Any]) -> dict[str, Any]:
        """Gives the memory of weights, keys and values back; what runs is computed anew afterwards. Returns the bytes."""
        self._asleep, self._used = True, await self._used_bytes()
        await self._engine.sleep(level=DISCARD, mode="keep")
        before, self._used = self._used, await self._used_bytes()
        return {"bytes": before - self._used}

    async def do_wake(self, _: dict[str, Any]) -> dict[str, Any]:
        """Takes the memory of keys and values again; new weights are there by then. Returns the bytes that both took."""
        await self._engine.wake_up(tags=["kv_cache"])
        self._asleep = False
        return {"bytes": await self._used_bytes() - self._used}

    async def _used_bytes(self) -> int:
        """Of every device that the engine computes on."""
        return sum(await self._engine.collective_rpc("used_bytes"))

    async def do_begin_update(self, _: dict[str, Any]) -> None:
        """Nothing is sampled from here on, and nothing computed with the old weights is kept."""
        if self._asleep:
            await self._engine.wake_up(tags=["weights"])  # keys and values come when the trainer has sent the last of its own
        else:
            await self._engine.pause_generation(**PAUSE)
        await self._engine.start_weight_update()

    async def do_update(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads the tensors of a file, or of a buffer on the GPU; returns their names, as they stand in it."""
        from safetensors import safe_open
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if (info := message.get("info")) is not None:
            names = info["names"]
        else:
            info = {"path": message["path"]}
            with safe_open(message["path"], framework="pt") as file:
                names = list(file.keys())
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        return {"names": names}

    async def do_finish_update(self, message: dict[str, Any]) -> None:
        """Takes the new weights into use, under their version; sampling stays paused. Raises RuntimeError where keys and values
        of the old weights are left: vLLM frees its cache only where no request holds a block of it."""
        await self._engine.finish_weight_update(weight_version=str(message["version"]))
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError(
                "the cache was not cleared: requests in flight hold keys and values that the old weights computed, and would go "
                "on from them"
            )
        self._version = message["version"]
        self._versions[str(message["version"])] = message["version"]

    async def do_cancel_update(self, _: dict[str, Any]) -> None:
        """Closes an update that was not completed. What the weights are then, nobody knows."""
        await self._engine.finish_weight_update()

    def _spelled_out(self, spans: Any, count: int) -> list[int]:
        """The version of each token, from vLLM's spans."""
        versions: list[int] = []
        for span in spans or ():
            versions += [self._versions[span.version]] * (span.end - len(versions))
        if len(versions) != count:
            raise RuntimeError(f"vLLM told the versions of {len(versions)} tokens out of {count}")
        return versions


def _cause(error: BaseException) -> BaseException:
    """What lies behind vLLM's `EngineGenerateError`, which says nothing itself."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


async def serve(connection: socket.socket) -> int:
    """Serves the other end of the socket until it is closed; returns the exit code."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 24)
    server = VLLMServer(reader, writer)
    try:
        await server.serve()
    finally:
        server.shut_down()
    return server.exit_code


def _end_with_parent(parent: int) -> None:
    """Ends this process and its children when the one that started it has ended, in the middle of loading a model too."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serves the socket whose descriptor is the first argument, then ends with every process that it started."""
    descriptor, own_group = int(sys.argv[1]), os.getpgid(0) == os.getpid()  # as it was started: it and its children
    os.set_inheritable(descriptor, False)
    if own_group:
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        code = asyncio.run(serve(socket.socket(fileno=descriptor)))
    finally:
        sys.stderr.flush()
    if code:
        os._exit(code)  # the other side ends what is left of the group
    if own_group:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
