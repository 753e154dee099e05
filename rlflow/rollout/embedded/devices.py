"""The device of the embedded engine."""

from __future__ import annotations

import torch

from rlflow.errors import ConfigError


def device_of(device: str | None, cuda_graphs: bool | None) -> torch.device:
    """The engine's device: the GPU where there is one, if none is named. Raises ConfigError for one
    that torch lacks."""
    there = torch.cuda.is_available()
    found = str(device or ("cuda" if there else "cpu"))
    if found.startswith("cuda") and not there:
        raise ConfigError(
            f"engine.device: expected cpu, as torch finds no GPU here; found '{found}'."
        )
    if cuda_graphs and not found.startswith("cuda"):
        raise ConfigError(f"engine.cuda_graphs: they need a GPU, found the device '{found}'.")
    return torch.device(found)
