"""Matrix products at the speed of the processor: torch takes MKL for float32 on CPUs, which leaves half of an AMD processor's
speed unused (AVX-512). oneDNN, which torch contains, does not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_MULTIPLICATIONS = 1 << 20  # for fewer, what oneDNN prepares per call and shape costs more than it saves


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs (N, in) times the transposed weight (out, in), plus the bias (out,): (N, out). Not for autograd to follow."""
    if _is_for_onednn(inputs, weight):
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return F.linear(inputs, weight, bias)


def accumulate(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds gradient.T @ inputs, the gradient of a weight, to total (out, in); gradient (N, out), inputs (N, in)."""
    if total.dtype == inputs.dtype and not _is_for_onednn(gradient.t(), inputs.t()):
        total.addmm_(gradient.t(), inputs)
    else:
        total.add_(linear(gradient.t(), inputs.t()))


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype is torch.float32
        and left.device.type == "cpu"
        and left.shape[0] * left.shape[1] * right.shape[0] >= ONEDNN_MULTIPLICATIONS
        and not torch.is_grad_enabled()  # the operation below has no derivative
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
