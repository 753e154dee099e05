"""CUDA graphs of the decode step: on a GPU a small model's step costs more to launch than to
compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.rollout.embedded.block_manager import blocks_for
from rlflow.rollout.embedded.sequences import Slots

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function's kernels and returns what replays them."""
DecodeStep = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(slots (B,), blocks per slot) -> (sampled tokens (B,), log-probs (B,)); the same kernels on the
same memory each time."""


@dataclass(frozen=True)
class Recorded:
    """A step for up to `len(batch)` slots: fill in `batch`, replay, read the results."""

    batch: Tensor
    replay: Callable[[], None]
    results: list[Tensor]


class DecodeGraphs:
    """Decode steps recorded once per size and replayed. Sizes are rounded up: rows that only pad a
    batch decode the spare slot, which nobody reads.

    capture: `CudaCapture`, or in tests a function that returns its argument. The tables of the
    slots must never be widened after the first step."""

    def __init__(self, slots: Slots, step: DecodeStep, capture: Capture) -> None:
        self._slots = slots
        self._step = step
        self._capture = capture
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def forget(self) -> None:
        """Drops what is recorded: the memory that it works on is gone."""
        self._recorded.clear()

    def run(self, order: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(slots (B,), sampled tokens (B,), log-probs (B,)) of one decode step of the slots in
        `order`."""
        longest = max(self._slots.length[slot] for slot in order)
        blocks = min(_power_of_two(blocks_for(longest)), self._slots.block_tables.shape[1])
        recorded = self._get(_rounded(len(order)), blocks)
        count = len(order)
        recorded.batch[:count].copy_(torch.tensor(order))
        recorded.batch[count:].fill_(self._slots.spare)
        recorded.replay()
        return recorded.batch[:count], recorded.results[0][:count], recorded.results[1][:count]

    def _get(self, rows: int, blocks: int) -> Recorded:
        if (rows, blocks) not in self._recorded:
            batch = torch.full((rows,), self._slots.spare, device=self._slots.tokens.device)
            results: list[Tensor] = []

            def step() -> None:
                results[:] = self._step(batch, blocks)

            self._recorded[rows, blocks] = Recorded(batch, self._capture(step), results)
        return self._recorded[rows, blocks]


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool: they never run at the same
    time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that replays the kernels of `function`, which is called twice here."""
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        # Libraries set themselves up on first use, which cannot be captured
        with torch.cuda.stream(warm_up):
            function()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


def _rounded(rows: int) -> int:
    return _power_of_two(rows) if rows <= 16 else -(-rows // 16) * 16


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
