"""Patches of megatron-core for machines without CUDA or without Transformer Engine's rotary
kernels; the only place that patches anything, once it is imported.

Measured with megatron-core 0.16.1 to 0.19.2 and torch 2.13 over gloo: unpatched, RNG seeding, the
pipeline schedules, DDP, the optimizer and tied embeddings over pipeline stages each stop at "Torch
not compiled with CUDA enabled"."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import (
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from rlflow.errors import MissingPackageError
from rlflow.trainer.megatron import layers
from rlflow.trainer.megatron.context import held_positions

_Result = TypeVar("_Result")
ROTARY = (
    (rope_utils, "fused_apply_rotary_pos_emb", layers.rotate),
    (rope_utils, "fused_apply_rotary_pos_emb_thd", layers.rotate_packed),
)
"""In place of kernels of Transformer Engine, which needs CUDA."""


def device() -> torch.device:
    """Where the model lives: the current CUDA device, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


@contextlib.contextmanager
def adapted() -> Iterator[None]:
    """Inside, megatron-core's calls for a CUDA device are answered by the CPU, and its deprecation
    warnings are silent.

    Model build, steps and checkpoints run here."""
    kernels = _rotary_kernels() if torch.cuda.is_available() else _without_cuda()
    with _quietly(), _without_transformer_engine(), kernels:
        yield


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    level = log.level
    log.setLevel(logging.ERROR)  # from 0.19 on it warns that every GPTModel is deprecated
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)
            warnings.filterwarnings(
                "ignore",
                message=r"`torch\.distributed\.\w+` is deprecated",
                category=FutureWarning,
            )
            # Split parameters
            warnings.filterwarnings(
                "ignore", message="The .grad attribute of a Tensor that is not a leaf"
            )
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, attributes (owner, name, value) have other values."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", torch.cpu.current_stream),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device="cpu": torch.get_rng_state()),
        (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _held_embedding),
        (yarn_rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _held_embedding),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (
            megatron_random,
            "_set_cuda_rng_state",
            lambda state, *_, **__: torch.set_rng_state(state),
        ),
        *ROTARY,
        # Brings counts of tokens to the host, on a stream of its own
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _counts_on_host),
    ]
    for owner, name, _ in replacements:
        if not hasattr(owner, name):
            raise MissingPackageError(
                f"megatron-core {megatron.core.__version__} has no {owner.__name__}.{name}, which "
                "is replaced where there is no CUDA; expected a version from 0.16 to 0.19: "
                "pip install 'megatron-core>=0.16,<0.20'"
            )
    with _replaced(*replacements), _CudaIsCpu():
        yield


def _rotary_kernels() -> AbstractContextManager[None]:
    """Inside, Megatron finds rotary kernels on a GPU without Transformer Engine too: its own code
    for packed rows makes the host wait four times per layer."""
    return _replaced(*(one for one in ROTARY if getattr(rope_utils, one[1]) is None))


def _without_transformer_engine() -> AbstractContextManager[None]:
    """Inside, megatron-core builds routers and latent attention where Transformer Engine is not
    installed.

    Unpatched, the router uses a name that only an import of Transformer Engine sets, and latent
    attention takes another package's presence for Transformer Engine's; without it, it knows no
    layer that is whole on every rank."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_latent_attention as latent
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    linear = latent.TELinear if HAVE_TE else layers.WholeLinear
    return _replaced((latent, "HAVE_TE", HAVE_TE), (latent, "TELinear", linear))


def sharing_groups() -> AbstractContextManager[None]:
    """Inside, Megatron's groups of one and the same rank are one group.

    Megatron makes some twenty groups, and gloo runs a thread for each that wakes 70 times a second:
    in one process they took 7% of a training step on busy cores."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    create, made = parallel_state.create_group, {}

    def create_or_share(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, **options)
        if ranks[0] not in made:
            made[ranks[0]] = create(ranks, **options)
        return made[ranks[0]]

    return _replaced((parallel_state, "create_group", create_or_share))


def _counts_on_host(
    dispatcher: MoEAlltoAllTokenDispatcher, _: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    """The counts, which are there already; torch wants those of a collective as numbers."""
    for name in ("input_splits", "output_splits"):
        splits = getattr(dispatcher, name)
        if isinstance(splits, Tensor):
            setattr(dispatcher, name, splits.tolist())
    return tokens_per_expert


def _held_embedding(embedding: Tensor, dimension: int, group: ProcessGroup) -> Tensor:
    """Megatron's choice of a context-parallel rank's positions, without pinned memory."""
    held = held_positions(
        [embedding.shape[dimension]], group.size(), group.rank(), embedding.device
    )
    return embedding.index_select(dimension, held)


def native(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function without the per-operation translation of `adapted`, for code that never names a
    CUDA device.

    The translation costs about 2 us per torch operation, which a tiny model would feel in its
    forward pass. Where there is CUDA, nothing is translated."""
    if torch.cuda.is_available():
        return function

    def call(*args: Any, **kwargs: Any) -> _Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


class _CudaIsCpu(TorchFunctionMode):
    """Reads `device="cuda"` as the CPU, drops `pin_memory`, and lets `Tensor.type()` say what
    megatron-core compares."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result
