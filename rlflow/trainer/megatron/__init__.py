"""The Megatron trainer: megatron-core's GPTModel, parallel state, schedules, DDP, optimizer and
dist_checkpointing.

The only folder that imports megatron.core.
"""

from __future__ import annotations

import warnings

from rlflow.errors import MissingPackageError

try:
    with warnings.catch_warnings():
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
