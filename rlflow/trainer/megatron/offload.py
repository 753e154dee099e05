"""What can leave the GPU: Adam's state and its update, gradient buffers between updates, the
weights of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with its moments in host memory: gradients go there, the fused kernel of the
    CPU updates a copy of the parameter, and that comes back. Saves 8 bytes per parameter of GPU
    memory, for the time of the transfers.

    One parameter is in flight at a time. (megatron-core's HybridDeviceOptimizer overlaps transfers
    with the update, but keeps its state where neither its checkpoints nor a machine without CUDA
    reach it.)"""

    @classmethod
    def instead_of(cls, optimizer: torch.optim.Optimizer) -> HostAdamW:
        """Takes over another Adam's groups as they are: torch would refuse Megatron's views of its
        buffers as parameters."""
        made = cls([torch.zeros(())])
        made.param_groups = optimizer.param_groups
        return made

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no line search here"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                value, gradient = parameter.data.to("cpu"), parameter.grad.to("cpu")
                torch._fused_adamw_(
                    [value],
                    [gradient],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"].add_(1)],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )
                parameter.data.copy_(value)


def release_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Frees the gradient buffers; every view of them stays valid for `restore_gradients`."""
    for buffer in (buffer for chunk in model for buffer in chunk.buffers):
        buffer.grad_data.untyped_storage().resize_(0)
    empty_cache()


def empty_cache() -> None:
    """Gives the GPU what torch keeps of freed memory: an engine in another process may need it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restore_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Allocates again what `release_gradients` freed; the content is undefined."""
    for buffer in (buffer for chunk in model for buffer in chunk.buffers):
        data = buffer.grad_data
        data.untyped_storage().resize_(data.numel() * data.element_size())


def to_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, page-locked where there is a GPU that they are to be read from."""
    copies = {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
    return (
        {name: value.pin_memory() for name, value in copies.items()}
        if torch.cuda.is_available()
        else copies
    )
