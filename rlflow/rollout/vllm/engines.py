"""The components `vllm`, over servers that rlflow starts, and `vllm_server`, over those at URLs."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlflow.components import takes
from rlflow.devices.gpu_buckets import GpuSharing
from rlflow.devices.gpu_plan import Bundle
from rlflow.errors import ConfigError
from rlflow.models.architecture import stored_architecture
from rlflow.models.entries import Experts
from rlflow.models.huggingface import iterate_weights, read_config
from rlflow.rollout.engine import Engine, check_sizes
from rlflow.rollout.engine_facts import with_facts
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.adapters import ADAPTER, AdapterForm
from rlflow.rollout.vllm.buckets import SharedFiles
from rlflow.rollout.vllm.device_buckets import DeviceCarrier, check_device_transfer
from rlflow.rollout.vllm.devices import check_memory, engine_devices
from rlflow.rollout.vllm.engine_requests import most_tokens
from rlflow.rollout.vllm.facts import BUCKET_MIB, START_S, VLLMFacts
from rlflow.rollout.vllm.inside.plugin import BACKEND
from rlflow.rollout.vllm.launch import FIXED, Launch, find_python
from rlflow.rollout.vllm.served_model import check_served_model
from rlflow.rollout.vllm.server import VLLMServer
from rlflow.rollout.vllm.vllm_engine import VLLMEngine

logger = logging.getLogger(__name__)

RESERVED = frozenset({"model", "dtype", "seed", "max_model_len", "max_num_seqs", "uds", "host",
                      "tensor_parallel_size", "trust_remote_code", "weight_transfer_config",
                      "enable_sleep_mode", "enable_return_routed_experts", "enable_lora",
                      "max_lora_rank", "max_loras", "lora_modules", "lora_target_modules",
                      *FIXED}) - {"disable_log_stats"}  # fmt: skip
"""Arguments of vLLM that rlflow gives itself."""


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Keywords of `make_vllm_engines` beside those that a run has itself.

    python: interpreter of an environment with vLLM; none: RLFLOW_VLLM_PYTHON, or this one if vLLM
    is installed here. tensor_parallel: devices of one engine. kv_gib: of keys and values on a CPU.
    bucket_mib: of weights that are on their way at a time. start_s: until vLLM must be ready.
    answer_s: how long it may be silent while requests run. eager: no compilation and no CUDA
    graphs; none: on CPUs. sleep: its memory is given back while the trainer works; none: where this
    process sees a GPU, which is then the one that vLLM takes. transfer: of new weights, by files in
    memory or on the GPUs that trainer and vLLM share. arguments: further ones of vLLM's
    AsyncEngineArgs.

    Raises ConfigError for what cannot be."""

    python: str | None = None
    max_concurrency: int = 128
    tensor_parallel: int = 1
    kv_gib: int = 1
    bucket_mib: int = BUCKET_MIB
    start_s: float = START_S
    answer_s: float = 1800.0
    eager: bool | None = None
    sleep: bool | None = None
    transfer: Literal["files", "ipc"] = "files"
    arguments: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if reserved := sorted(RESERVED & set(self.arguments or {})):
            raise ConfigError(
                f"rollout.engine.arguments: {', '.join(reserved)}: rlflow sets it itself; leave it "
                "out."
            )
        sizes = ("max_concurrency", "tensor_parallel", "kv_gib", "bucket_mib")
        check_sizes("rollout.engine", **{name: getattr(self, name) for name in sizes})
        if self.transfer == "ipc":
            check_device_transfer()

    @property
    def sleeps(self) -> bool:
        return torch.cuda.is_available() if self.sleep is None else self.sleep

    def flags(self) -> dict[str, Any]:
        """Of `vllm serve`, by their names with underscores."""
        backend = "ipc" if self.transfer == "ipc" else BACKEND
        return {
            "max_num_seqs": self.max_concurrency,
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": not torch.cuda.is_available() if self.eager is None else self.eager,
            "weight_transfer_config": {"backend": backend},
            **(self.arguments or {}),
        }

    def start(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None,
        flags: Mapping[str, Any],
        gpus: Sequence[Bundle] | None,
        number: int,
        files: SharedFiles,
        experts: Experts | None = None,
        adapters: AdapterForm | None = None,
        **options: Any,
    ) -> VLLMEngine:
        """An engine, whose server has yet to load its model. flags: beside those of the options.
        number: of the engine. experts: whose tokens it names. adapters: that it takes in place of
        weights. options: of VLLMEngine, which are no options of these."""
        at_once = self.max_concurrency
        ipc = self.transfer == "ipc" and adapters is None
        numbers = tuple(gpu.number for gpu in gpus or ())
        launch = Launch(
            find_python(self.python),
            {**self.flags(), **flags},
            kv_gib=self.kv_gib,
            devices=None if gpus is None else [gpu.gpu for gpu in gpus],
            sleep=self.sleeps,
            # Workers of a machine each have engine 0
            cache="-".join([str(number), *(gpu.gpu for gpu in gpus or ())]),
            adapters=adapters,
            variables={
                # Handles of GPU memory come pickled, from here alone.
                **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if ipc else {}),
                **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if experts else {}),  # it alone names experts
            },
        )
        init = {"packed": True} if ipc else {}
        server = VLLMServer(
            "buckets" if adapters is None else "adapters",
            connections=at_once,
            launch=launch,
            init_info=init,
            model=None if adapters is None else ADAPTER,
            experts=experts,
        )
        return VLLMEngine(
            path,
            tokenizer,
            server,
            (lambda _: DeviceCarrier()) if ipc else files.carrier,
            max_concurrency=at_once,
            bucket_mib=self.bucket_mib,
            start_s=self.start_s,
            answer_s=self.answer_s,
            sleeps=self.sleeps,
            sharing=GpuSharing(self.bucket_mib << 20, numbers) if ipc else None,
            adapters=adapters,
            **options,
        )


@with_facts(VLLMFacts)
@takes(VLLMOptions)
def make_vllm_engines(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    engines: int = 1,
    devices: list[list[str]] | None = None,
    max_tokens: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    deterministic: bool = False,
    trust_remote_code: bool = False,
    routes: bool = False,
    adapters: dict[str, Any] | None = None,
    **options: Any,
) -> list[Engine]:
    """`engines` engines over the same model, each a `vllm serve` of its own, a child of this
    process under an interpreter of its own. They start side by side. options: keywords of
    VLLMOptions.

    devices: the GPUs of each engine, as CUDA_VISIBLE_DEVICES names them; none: engine i has those
    from i * tensor_parallel on. max_tokens: of a prompt and its completion together; none: the
    model's positions. seed: of the random numbers; every process and engine has others. routes:
    completions say which experts their tokens went to. adapters: {rank: N, targets: [...]} of those
    that come in place of weights; none: weights come.

    Raises ConfigError, RolloutError where one of them does not start; no process is left then."""
    _check_deterministic(deterministic)
    check_sizes("rollout.engine", engines=engines, max_tokens=max_tokens)
    given = VLLMOptions(**options)
    placed = engine_devices(engines, given.tensor_parallel, devices)
    check_memory(placed, (given.arguments or {}).get("gpu_memory_utilization"))
    if given.transfer == "ipc":
        check_device_transfer(placed)
    flags = {
        "model": str(Path(path).absolute()),
        "dtype": dtype,
        "max_model_len": most_tokens(path, max_tokens),
        "trust_remote_code": trust_remote_code,
        **({"enable_return_routed_experts": True} if routes else {}),
    }
    experts = experts_named(path) if routes else None
    form = None if adapters is None else AdapterForm.of(path, adapters)
    files = SharedFiles()

    def start(number: int) -> VLLMEngine:
        gpus = placed[number] if placed else None
        own = {**flags, "seed": own_seed(seed, number)}
        options = {"max_tokens": max_tokens, "dtype": dtype}
        return given.start(path, tokenizer, own, gpus, number, files, experts, form, **options)

    logger.info(
        "starting vLLM for %s, %d process(es); this takes half a minute or more", path, engines
    )
    return _all_ready(start(number) for number in range(engines))


def make_vllm_server_engines(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    url: str | Sequence[str],
    model: str | None = None,
    api_key_variable: str = "VLLM_API_KEY",
    weights_folder: str | None = None,
    max_concurrency: int = 128,
    max_tokens: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    deterministic: bool = False,
    bucket_mib: int = 256,
    start_s: float = 60.0,
    answer_s: float = 1800.0,
    retry_s: float = 60.0,
    routes: bool = False,
) -> list[Engine]:
    """An engine for each URL, over the model directory `path`, which the servers serve: its config
    and tokenizer are read here.

    model: its name at the servers; none: the only one. api_key_variable: environment variable with
    their key; none is sent where it is not set. weights_folder: a folder that rlflow and the
    servers see under the same path, for new weights; they begin with those of `path` then. None:
    they keep those that they have, which are compared with `path`, and cannot be trained with.
    retry_s: how long a request is sent again while nobody answers. routes: completions say which
    experts their tokens went to.

    Raises ConfigError, RolloutError where a server does not answer, is none that can be used, or
    serves another model."""
    _check_deterministic(deterministic)
    sizes: dict[str, Any] = {
        "max_concurrency": max_concurrency,
        "bucket_mib": bucket_mib,
        "max_tokens": max_tokens,
    }
    check_sizes("rollout.engine", **sizes)
    options = {**sizes, "dtype": dtype, "start_s": start_s, "answer_s": answer_s}
    urls = check_urls([url] if isinstance(url, str) else list(url))
    folder = check_folder(weights_folder)
    files = None if folder is None else SharedFiles(folder, keep=True)
    experts = experts_named(path) if routes else None

    carrier = files.carrier if files else None

    def connect(one: str) -> VLLMEngine:
        server = VLLMServer(
            "folder" if files else None,
            connections=max_concurrency,
            url=one,
            key=os.environ.get(api_key_variable),
            model=model,
            retry_s=retry_s,
            experts=experts,
        )
        return VLLMEngine(path, tokenizer, server, carrier, **options)

    return _all_ready(map(connect, urls), _begin)


def experts_named(path: str | Path) -> Experts:
    """The experts of the model, to be named with each token. Raises ConfigError without any."""
    experts = stored_architecture(read_config(path)).experts
    if experts is None:
        raise ConfigError("trainer.router_replay: the model has no experts; set it to off.")
    return experts


def own_seed(seed: int, number: int) -> int:
    """Of an engine's random numbers, as requests of episodes have no seeds of their own: another
    one in each process, so that the same prompt at two workers, and after a resume, is drawn
    anew."""
    return zlib.crc32(f"{seed}/{number}/{socket.gethostname()}/{os.getpid()}".encode())


def check_urls(urls: list[str]) -> list[str]:
    """The addresses. Raises ConfigError for one that is none."""
    for one in urls or ["none"]:
        if not one.startswith(("http://", "https://")):
            raise ConfigError(
                "rollout.engine.url: expected an address such as http://localhost:8000, found "
                f"'{one}'."
            )
    return urls


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
            f"rollout.engine.weights_folder: {path} cannot be written; name a folder that the "
            "server sees too."
        )
    return path


def _check_deterministic(deterministic: bool) -> None:
    if deterministic:
        raise ConfigError(
            "rollout.engine: vLLM does not give equal bits in every run; set "
            "run.deterministic=false, or take another engine."
        )


def _begin(engine: VLLMEngine) -> None:
    """Gives the server the weights of the model directory, or looks whether it has them."""
    thread = LoopThread("rlflow-first-weights")  # who makes engines may be in an event loop
    try:
        if engine.takes_weights:
            thread.run(engine.load_weights(iterate_weights(engine.path), 0))
        else:
            root = engine.server_facts.root
            thread.run(check_served_model(engine, engine.path, engine.server.name, root))
    finally:
        thread.close()


def _all_ready(
    making: Iterable[VLLMEngine], begin: Callable[[VLLMEngine], object] = lambda engine: None
) -> list[Engine]:
    """Waits until all engines are ready, `begin` done with each; where one fails, none is left."""
    made: list[VLLMEngine] = []
    try:
        for engine in making:
            made.append(engine)  # at once: those before one that fails are to be ended
        for engine in made:
            engine.wait_until_ready()
            begin(engine)
    except BaseException:
        for engine in made:
            engine.kill()
        raise
    return list(made)
