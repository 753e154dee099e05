"""Names of torch dtypes and devices in the options of encoders and indices."""

from __future__ import annotations

import torch

from rlflow.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(name: str) -> torch.device:
    """The torch device of a name. Raises ConfigError: unknown, or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, found '{name}'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, found '{name}'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: '{name}' asked for, but torch sees {torch.cuda.device_count()} GPUs here. "
            "Use cpu."
        )
    return device
