"""What megatron-core needs where there is no CUDA. A no-op where there is; the only place that
patches anything.

Measured with megatron-core 0.16.1 and torch 2.13 over gloo: unpatched, RNG seeding, the pipeline
schedules, DDP, the optimizer and tied embeddings over pipeline stages each stop at "Torch not
compiled with CUDA enabled"."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from rlflow.errors import MissingPackageError
from rlflow.trainer.megatron import layers
from rlflow.trainer.megatron.context import held_positions
from rlflow.trainer.options import MEGATRON_WITHOUT_CUDA, untested_megatron

_Result = TypeVar("_Result")


def device() -> torch.device:
    """Where the model lives: the current CUDA device, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def check_version() -> None:
    """Raises MissingPackageError where there is no CUDA and the adaptation was not tested with this
    megatron-core."""
    version = megatron.core.__version__
    if not torch.cuda.is_available() and not version.startswith(MEGATRON_WITHOUT_CUDA):
        raise MissingPackageError(untested_megatron(version))


@contextlib.contextmanager
def adapted() -> Iterator[None]:
    """Inside, megatron-core's calls for a CUDA device are answered by the CPU, and its deprecation
    warnings are silent.

    Model build, steps and checkpoints run here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)
        warnings.filterwarnings(
            "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
        )
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf"
        )  # split parameters
        if torch.cuda.is_available():
            yield
        else:
            with _without_cuda():
                yield


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device="cpu": torch.get_rng_state()),
        (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _held_embedding),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (
            megatron_random,
            "_set_cuda_rng_state",
            lambda state, *_, **__: torch.set_rng_state(state),
        ),
        # Kernels of Transformer Engine, which needs CUDA.
        (rope_utils, "fused_apply_rotary_pos_emb", layers.rotate),
        (rope_utils, "fused_apply_rotary_pos_emb_thd", layers.rotate_packed),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        with _CudaIsCpu():
            yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextlib.contextmanager
def without_transformer_engine() -> Iterator[None]:
    """Inside, megatron-core 0.16.1 builds routers and latent attention where Transformer Engine is
    not installed.

    Unpatched, the router uses a name that only an import of Transformer Engine sets, and latent
    attention takes another package's presence for Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    gemm = [] if hasattr(moe_utils, "te_general_gemm") else [(moe_utils, "te_general_gemm", None)]
    engine = [] if HAVE_TE else [(multi_latent_attention, "HAVE_TE", False)]
    before = multi_latent_attention.HAVE_TE
    for owner, name, value in (*gemm, *engine):
        setattr(owner, name, value)
    try:
        yield
    finally:
        multi_latent_attention.HAVE_TE = before
        for owner, name, _ in gemm:
            delattr(owner, name)


@contextlib.contextmanager
def sharing_groups() -> Iterator[None]:
    """Inside, Megatron's groups of one and the same rank are one group.

    Megatron makes some twenty groups, and gloo runs a thread for each that wakes 70 times a second:
    in one process they took 7% of a training step on busy cores."""
    if torch.cuda.is_available():
        yield
        return
    create, made = parallel_state.create_group, {}

    def create_or_share(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, **options)
        if ranks[0] not in made:
            made[ranks[0]] = create(ranks, **options)
        return made[ranks[0]]

    parallel_state.create_group = create_or_share
    try:
        yield
    finally:
        parallel_state.create_group = create


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
    forward pass."""

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
