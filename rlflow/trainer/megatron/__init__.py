"""The Megatron trainer: megatron-core's GPTModel, parallel state, schedules, DDP, optimizer and
dist_checkpointing.

The only folder that imports megatron.core.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlflow.errors import MissingPackageError


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Inside, what torch.compile decorates stays as it is, unless there is a GPU.

    megatron-core decorates small functions as it is imported, which takes a third of that time on
    CPUs, for the compiler; and the first call of one would need a C++ compiler."""

    def keep(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        return function or keep

    usual = torch.compile
    if not torch.cuda.is_available():
        torch.compile = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = usual


try:
    with warnings.catch_warnings(), _uncompiled():
        # megatron-core says half a dozen times that Transformer Engine and Apex are absent; `rlflow
        # doctor` says it once.
        warnings.simplefilter("ignore")
        import megatron.core  # noqa: F401

        from rlflow.trainer.megatron.megatron_trainer import MegatronTrainer
except ModuleNotFoundError as error:
    missing = (error.name or "").split(".")[0]
    wanted = {"megatron": "megatron-core", "triton": "triton"}.get(missing)
    if wanted is None:
        raise
    raise MissingPackageError(
        f"trainer.backend=megatron needs {wanted}: pip install {wanted}"
    ) from None

__all__ = ["MegatronTrainer"]
