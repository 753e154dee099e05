"""Megatron's DDP wrapper and Adam, with the state filled from the start so that it saves and loads
at any step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from rlflow.trainer.megatron.offload import HostAdamW
from rlflow.trainer.optimizers import AdamW
from rlflow.trainer.reducing import check_finite


def wrap(chunks: Sequence[GPTModel], distributed: bool = False) -> list[DistributedDataParallel]:
    """The model chunks with gradient buffers in float32 that are summed over data-parallel ranks;
    `distributed`: each rank gets the sum of its own part only, and the parameters live in buffers
    of which each rank updates its part."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def make_optimizer(
    model: Sequence[DistributedDataParallel], options: AdamW, lr: float, max_gradient_norm: float
) -> MegatronOptimizer:
    """Megatron's AdamW over the wrapped chunks; where they were wrapped so, its state is split over
    data-parallel ranks. max_gradient_norm: 0 does not clip."""
    dtype = model[0].config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=max_gradient_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
    for one in chained(optimizer):
        if options.offload:
            one.optimizer = HostAdamW(one)
        for group in one.param_groups:  # Megatron leaves this to its own scheduler
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            # One pass over the state instead of about ten
            if isinstance(one.optimizer, torch.optim.AdamW):
                group["fused"], group["foreach"] = True, False
    for chunk in model:
        chunk.config.grad_scale_func = optimizer.scale_loss
    set_updates(optimizer, 0)
    return optimizer


def chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron's optimizers of which this one is a chain: experts have one of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def set_updates(optimizer: MegatronOptimizer, updates: int) -> None:
    """Gives every parameter its moments (zero where there are none yet), and the optimizer its
    count of updates, where it keeps it.

    Checkpoints hold one count for all parameters. torch's AdamW has one per parameter, which must
    not become one shared tensor: every parameter's step would increment it, and training would
    diverge silently. FusedAdam of Transformer Engine and of Apex has one per group."""
    for inner in (one.optimizer for one in chained(optimizer)):
        per_parameter = isinstance(inner, torch.optim.Adam)
        for group in inner.param_groups:
            if not per_parameter:
                group["step"] = updates
            for parameter in group["params"]:
                device = "cpu" if isinstance(inner, HostAdamW) else parameter.device
                state = inner.state[parameter]
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment not in state:
                        state[moment] = torch.zeros_like(parameter.data, device=device)
                if per_parameter:
                    state["step"] = torch.tensor(float(updates), device=device)
        if isinstance(inner, HostAdamW):
            inner.refresh()


def zero_gradients(model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Empties the gradient buffers. Both calls are needed: the optimizer leaves every `grad`
    aliasing its buffer, and the next backward pass would add to the buffer twice."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def step(optimizer: MegatronOptimizer, lr: float, updates: int = 0) -> float:
    """Clips and applies the accumulated gradients; returns their norm before clipping, over all
    ranks.

    Where the norm is 0, nothing is applied: the moments alone would move the weights, and nothing
    asked for that.

    updates: made so far. Raises RLFlowError, and leaves the weights alone, where the norm is not
    finite."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    check_finite("gradient norm", norm, updates)
    if norm == 0:
        return norm
    # Applied to the buffer at once: Megatron's own clipping walks the parameters one by one.
    limit = optimizer.config.clip_grad
    if limit > 0 and norm > limit:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(limit / (norm + 1e-6))
    optimizer.step_with_ready_grads()
    return norm
