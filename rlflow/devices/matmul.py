"""Matrix products at the speed of the processor: of the two libraries in torch, the one that is
faster here, by measurement.

torch takes MKL for float32 on CPUs, which leaves half of an AMD processor's speed unused; oneDNN
does not, but takes up to twice MKL's time for the gradients of weights on an Intel processor.
`RLFLOW_MATMUL=mkl|onednn|auto` overrides it."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.errors import ConfigError

Library = Literal["mkl", "onednn"]
LIBRARIES: tuple[Library, ...] = ("mkl", "onednn")
VARIABLE = "RLFLOW_MATMUL"
# For fewer, what oneDNN prepares per call and shape costs more than it saves
ONEDNN_MULTIPLICATIONS = 1 << 20
CLASSES = {
    "few rows": (16, 512, 1024),
    "rows": (256, 512, 512),
    "weights": (256, 512, 512),
}
"""Classes of products, and the (rows, in, out) by which they are measured: decoding; forward
passes, and the gradients of inputs; the gradients of weights. About 0.1 to 1 ms each."""
FEW_ROWS = 64
ROUNDS = 5
# OneDNN must be, to be taken: a choice that noise decides would not come out twice
CLEARLY_FASTER = 1.25
BLOCKS = (4096, 2048, 1024, 512, 256, 128, 64)
"""Rows that oneDNN gets in one call. It keeps code and state for every shape that it meets (0.5 MiB
each; a smaller ONEDNN_PRIMITIVE_CACHE_CAPACITY keeps hardly less): of rows whose number changes
with each micro-batch, memory would grow for a thousand shapes. What is left of them is MKL's in
float32; in bfloat16, where torch knows oneDNN alone, it is filled up."""
STEP = 16  # few rows, and few outputs, are filled up to a multiple of it, for the same reason
WIDE = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether this torch gives products of bfloat16 in float32 (from 2.8, on GPUs)."""
FEWEST_ROWS = 8  # for fewer, filling up costs more than it saves


class Products:
    """Which library computes which class of products in this process: chosen once, when first asked
    for, then kept."""

    def __init__(self) -> None:
        self._chosen: dict[str, Library] | None = None
        self._lock = threading.Lock()

    def chosen(self) -> Mapping[str, Library]:
        """Class -> library: as RLFLOW_MATMUL says, else by measurement. Raises ConfigError for
        another value of it."""
        if self._chosen is None:
            # Engine and trainer ask from threads of their own, and must get the same answer
            with self._lock:
                if self._chosen is None:
                    self._chosen = _from_environment() or measured()
        return self._chosen

    def fix(self, chosen: Mapping[str, Library] | None = None) -> None:
        """Takes what another process has chosen; without it, what the processor's maker suggests:
        no clock decides."""
        with self._lock:
            self._chosen = dict(chosen) if chosen else _from_environment() or by_maker()


PRODUCTS = Products()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs (N, in) times the transposed weight (out, in), plus the bias (out,): (N, out). Not for
    autograd to follow."""
    rows, out = inputs.shape[0], weight.shape[0]
    if _is_bfloat16(inputs):
        return _linear_bfloat16(inputs, weight, bias)
    of = "few rows" if rows < FEW_ROWS else "rows"
    if rows < FEWEST_ROWS or not _is_for_onednn(inputs, weight, of):
        return F.linear(inputs, weight, bias)
    if out % STEP and out < BLOCKS[0]:  # vectors of queries, not the weights of a layer
        more = None if bias is None else F.pad(bias, (0, -out % STEP))
        return linear(inputs, _filled(weight), more)[:, :out].contiguous()
    if rows < FEW_ROWS:
        return _onednn(_filled(inputs), weight, bias)[:rows]
    blocks = _blocks(rows)
    if len(blocks) == 1:
        return _onednn(inputs, weight, bias)
    result = inputs.new_empty(rows, out)
    for block in blocks:
        product = _onednn if _is_whole(block) else F.linear
        result[block] = product(inputs[block], weight, bias)
    return result


def linear_float32(inputs: Tensor, weight: Tensor) -> Tensor:
    """As `linear` without a bias, in float32: on GPUs the sums of a product of bfloat16 as they
    are, unrounded."""
    if inputs.is_cuda and WIDE and inputs.dtype is not torch.float32:
        return torch.mm(inputs, weight.t(), out_dtype=torch.float32)
    return linear(inputs, weight).float()


def accumulate(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds gradient.T @ inputs, the gradient of a weight, to total (out, in); gradient (N, out),
    inputs (N, in)."""
    if _is_bfloat16(inputs):
        for block in _blocks(inputs.shape[0]):
            _add(total, _filled(gradient[block]), _filled(inputs[block]))
        return
    if not _is_for_onednn(gradient.t(), inputs.t(), "weights"):
        _add(total, gradient, inputs)
        return
    for block in _blocks(inputs.shape[0]):
        add = _add_by_onednn if _is_whole(block) else _add
        add(total, gradient[block], inputs[block])


def measured() -> dict[str, Library]:
    """Class -> the library that is faster with this process's threads, in some 20 ms: of both the
    best of rounds in turns."""
    if not _has_onednn():
        return dict.fromkeys(CLASSES, "mkl")
    result: dict[str, Library] = {}
    with torch.no_grad():
        for name, (rows, width, out) in CLASSES.items():
            inputs = torch.ones(rows, width)
            weight = torch.ones(out, width)
            gradient = torch.ones(rows, out)
            pair: tuple[Callable[[], object], ...] = (
                partial(F.linear, inputs, weight),
                partial(_onednn, inputs, weight, None),
            )
            if name == "weights":
                pair = tuple(
                    partial(add, torch.zeros(out, width), gradient, inputs)
                    for add in (_add, _add_by_onednn)
                )
            mkl_s, onednn_s = _best_s(pair)
            result[name] = "onednn" if CLEARLY_FASTER * onednn_s < mkl_s else "mkl"
    return result


def _best_s(pair: Sequence[Callable[[], object]]) -> list[float]:
    """The least seconds that each takes, in turns, so that other work on the machine meets both;
    the first round only warms."""
    best_s = [float("inf")] * len(pair)
    for turn in range(ROUNDS + 1):
        for place, call in enumerate(pair):
            start_s = time.perf_counter()
            call()
            if turn:
                best_s[place] = min(best_s[place], time.perf_counter() - start_s)
    return best_s


def by_maker() -> dict[str, Library]:
    """Class -> library by the processor's maker: MKL on Intel's, which it is made for, oneDNN on
    all others."""
    library: Library = (
        "mkl" if "intel" in processor_name().lower() or not _has_onednn() else "onednn"
    )
    return dict.fromkeys(CLASSES, library)


def processor_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _from_environment() -> dict[str, Library] | None:
    """What RLFLOW_MATMUL asks for; None: to be measured."""
    value = os.environ.get(VARIABLE, "auto").strip().lower()
    for library in LIBRARIES:
        if value == library and (library == "mkl" or _has_onednn()):
            return dict.fromkeys(CLASSES, library)
    if value not in ("auto", ""):
        raise ConfigError(
            f"{VARIABLE}: expected {', '.join(LIBRARIES)} (where torch contains it) or auto, found "
            f"'{value}'."
        )
    return None


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_for_onednn(left: Tensor, right: Tensor, of: str) -> bool:
    """left (N, K), right (M, K)."""
    return (
        left.dtype is torch.float32
        and left.device.type == "cpu"
        and left.shape[0] * left.shape[1] * right.shape[0] >= ONEDNN_MULTIPLICATIONS
        and not torch.is_grad_enabled()  # oneDNN's operation has no derivative
        and PRODUCTS.chosen()[of] == "onednn"
    )


def _is_bfloat16(values: Tensor) -> bool:
    """Whether torch's products of these are oneDNN's, in bfloat16, and autograd need not follow."""
    on_cpu = values.device.type == "cpu"
    return values.dtype is torch.bfloat16 and on_cpu and not torch.is_grad_enabled()


def _linear_bfloat16(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = inputs.shape[0]
    if rows < FEWEST_ROWS or rows in BLOCKS:
        return F.linear(inputs, weight, bias)
    result = inputs.new_empty(rows, weight.shape[0])
    for block in _blocks(rows):
        product = F.linear(_filled(inputs[block]), weight, bias)
        result[block] = product[: block.stop - block.start]
    return result


def _onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def _add(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    if total.dtype == inputs.dtype:
        total.addmm_(gradient.t(), inputs)
    elif total.is_cuda and WIDE:
        torch.addmm(total, gradient.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(F.linear(gradient.t(), inputs.t()))


def _add_by_onednn(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    total.add_(_onednn(gradient.t(), inputs.t(), None))


def _filled(values: Tensor) -> Tensor:
    """With rows of zeros, up to a multiple of STEP."""
    return F.pad(values, (0, 0, 0, -values.shape[0] % STEP))


def _blocks(rows: int) -> list[slice]:
    """`rows` cut into blocks of the sizes of BLOCKS, largest first, and what is left."""
    blocks, start = [], 0
    for size in BLOCKS:
        while rows - start >= size:
            blocks.append(slice(start, start + size))
            start += size
    return [*blocks, slice(start, rows)] if start < rows else blocks


def _is_whole(block: slice) -> bool:
    return block.stop - block.start in BLOCKS
