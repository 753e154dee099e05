"""Moves off the GPU: Adam's state, its float32 weights and its update, gradient buffers between
updates, the weights of snapshots."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlflow.trainer.megatron.cpu import device

PIECE = 1 << 24  # elements in flight: 64 MiB of gradients, twice
ALIGNMENT = 64  # bytes


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with its moments and float32 weights in host memory. Gradients go there, the
    fused kernel of the CPU updates, and new weights come back in the model's type: 12 bytes per
    parameter of a bfloat16 model leave the GPU, 8 of a float32 one.

    Pieces of PIECE elements take turns in two slots: while one is updated, the other's weights
    leave and its next gradients arrive. (megatron-core's HybridDeviceOptimizer keeps its state
    where neither its checkpoints nor a machine without CUDA reach it.)"""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        """Takes over Megatron's Adam, and keeps Megatron from copying weights to the model."""
        super().__init__([torch.zeros(())])  # torch refuses Megatron's views as parameters
        self.param_groups = optimizer.optimizer.param_groups
        self._targets = dict(_copied(optimizer))
        optimizer._copy_main_params_to_model_params = lambda: None
        for parameter in self._parameters():
            self.state[parameter]["param"] = parameter.data.to("cpu", copy=True)
            if parameter in self._targets:
                parameter.untyped_storage().resize_(0)  # shape and gradient stay
        self._slots = (_Slot(), _Slot())

    @torch.no_grad()
    def refresh(self) -> None:
        """Reads the weights anew that the model itself has in float32."""
        for parameter in self._parameters():
            if parameter not in self._targets:
                self.state[parameter]["param"].copy_(parameter.data)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no line search here"
        for slot in self._slots:
            slot.begin()
        before: _Slot | None = None
        for slot, piece in zip(itertools.cycle(self._slots), self._pieces(), strict=False):
            slot.fetch(piece)
            if before is not None:
                before.update()
            before = slot
        if before is not None:
            before.update()
        for slot in self._slots:
            slot.wait()

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                target = self._targets.get(parameter, parameter).data
                moments = state["exp_avg"], state["exp_avg_sq"]
                whole = (parameter.grad, target, state["param"], *moments)
                for part in zip(*(tensor.view(-1).split(PIECE) for tensor in whole), strict=True):
                    yield _Piece(group, state["step"], *part)


class _Piece(NamedTuple):
    """Successive elements of a parameter: on the GPU `gradient` and the model's weights, `target`;
    the rest on the host."""

    group: dict[str, Any]
    step: Tensor
    gradient: Tensor
    target: Tensor
    value: Tensor
    mean: Tensor
    square: Tensor


class _Slot:
    """Page-locked buffers for a piece at a time, and a stream on which it comes and goes."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._piece: _Piece

    def begin(self) -> None:
        """Lets the stream wait for what the GPU was asked so far: gradients."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        """Returns when the slot's copies are made."""
        if self._stream is not None:
            self._stream.synchronize()

    def fetch(self, piece: _Piece) -> None:
        """Begins to copy the gradients, once the weights before them have left."""
        self._piece = piece
        self._copy(self._buffer(torch.float32, piece), piece.gradient)

    def update(self) -> None:
        """Updates the piece, and begins to copy its new weights."""
        self.wait()
        piece = self._piece
        options = {name: piece.group[name] for name in ("lr", "weight_decay", "eps")}
        torch._fused_adamw_(
            [piece.value],
            [self._buffer(torch.float32, piece)],
            [piece.mean],
            [piece.square],
            [],
            [piece.step],
            beta1=piece.group["betas"][0],
            beta2=piece.group["betas"][1],
            amsgrad=False,
            maximize=False,
            **options,
        )
        self._copy(piece.target, self._buffer(piece.target.dtype, piece).copy_(piece.value))

    def _buffer(self, dtype: torch.dtype, piece: _Piece) -> Tensor:
        if dtype not in self._buffers:
            pinned = self._stream is not None
            self._buffers[dtype] = torch.empty(PIECE, dtype=dtype, pin_memory=pinned)
        return self._buffers[dtype][: len(piece.gradient)]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)


def _copied(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(the optimizer's float32 weights, the model's weights that Megatron makes of them): whole
    parameters, or the parts that this rank updates."""
    for names in (
        ("fp32_from_float16_groups", "float16_groups"),
        ("shard_fp32_from_float16_groups", "shard_float16_groups"),
    ):
        for groups in zip(*(getattr(optimizer, name, []) for name in names), strict=True):
            yield from zip(*groups, strict=True)


def release_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Frees the gradient buffers; every view of them stays valid for `restore_gradients`."""
    for buffer in _buffers(model):
        buffer.grad_data.untyped_storage().resize_(0)
    empty_cache()


def _buffers(model: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    """Those of all parameters; experts have their own."""
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def empty_cache() -> None:
    """Gives the GPU what torch keeps of freed memory: an engine in another process may need it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def gradients_allocated(model: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Inside, what `release_gradients` freed is there; its content is undefined."""
    try:
        for buffer in _buffers(model):
            data = buffer.grad_data
            data.untyped_storage().resize_(data.numel() * data.element_size())
        yield
    finally:
        release_gradients(model)


@contextlib.contextmanager
def swapped(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters of these names hold the values, where the model computes."""
    before = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.to(device(), non_blocking=True)
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value


def to_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, page-locked where there is a GPU that they are to be read from."""
    if not torch.cuda.is_available():
        return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
    copies: dict[str, Tensor] = {}
    waiting = dict(values)
    for size, names in shared_buffers({name: value.nbytes for name, value in values.items()}):
        buffer, place = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
        for name in names:
            value = waiting.pop(name).detach()
            part = buffer[place : place + value.nbytes].view(value.dtype).view(value.shape)
            copies[name] = part.copy_(value, non_blocking=True)
            place += _aligned(value.nbytes)
    torch.cuda.current_stream().synchronize()
    return copies


def shared_buffers(sizes: dict[str, int]) -> Iterator[tuple[int, list[str]]]:
    """(bytes, names of the tensors in it) of few buffers for all tensors. torch rounds each
    page-locked allocation up to a power of two, so these are powers of two: of one per tensor a
    third would be waste."""
    names = list(sizes)
    while names:
        left = sum(_aligned(sizes[name]) for name in names)
        first = _aligned(sizes[names[0]])
        size = max(1 << (left.bit_length() - 1), 1 << (max(first, 1) - 1).bit_length())
        held, used = [], 0
        while names and used + _aligned(sizes[names[0]]) <= size:
            used += _aligned(sizes[names[0]])
            held.append(names.pop(0))
        yield size, held


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
