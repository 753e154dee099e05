"""A checkpoint that is to be written, of either format, and what it holds beside weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..dtypes import DType
from .files import OutputFile


@dataclass(frozen=True)
class Checkpoint:
    """files: those with weights. finish: writes the others into a directory that has these."""

    files: tuple[OutputFile, ...]
    finish: Callable[[Path], None]


def namespace(arguments: dict[str, Any]) -> argparse.Namespace:
    """Megatron's arguments, with torch's dtypes."""
    return argparse.Namespace(**{name: _plain(value) for name, value in arguments.items()})


def common_state(args: argparse.Namespace) -> dict[str, Any]:
    """What both formats have beside the model."""
    return {"args": args, "iteration": 0, "checkpoint_version": 3.0}


def _plain(value: Any) -> Any:
    return getattr(torch, value.name) if isinstance(value, DType) else value
