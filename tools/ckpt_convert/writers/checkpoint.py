"""A checkpoint that is to be written, of either format, and what it holds beside weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import OutputFile


@dataclass(frozen=True)
class Checkpoint:
    """files: those with weights. finish: writes the others into a directory that has these."""

    files: tuple[OutputFile, ...]
    finish: Callable[[Path], None]


def common_state(arguments: dict[str, Any]) -> dict[str, Any]:
    """What both formats have beside the model: Megatron's arguments, with torch's dtype."""
    dtype = getattr(torch, arguments["params_dtype"].name)
    args = argparse.Namespace(**{**arguments, "params_dtype": dtype})
    return {"args": args, "iteration": 0, "checkpoint_version": 3.0}
