"""rlflow: reinforcement learning for LLM agents. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.batching import make_batch
    from rlflow.config.schema import RunConfig, load_config
    from rlflow.environment import Environment
    from rlflow.errors import PolicyError
    from rlflow.loop import train
    from rlflow.report.metrics import Metric
    from rlflow.rollout import Rollout
    from rlflow.run.evaluate import evaluate
    from rlflow.run.export import export_policy
    from rlflow.run.script import RunFolder
    from rlflow.trainer.base import Trainer
    from rlflow.types import (
        Batch,
        Episode,
        Group,
        PolicyOutput,
        Segment,
        Step,
        StopReason,
        Task,
        Trajectory,
    )

__version__ = "0.1.0"

_HOMES = {
    "Environment": "rlflow.environment",
    "Metric": "rlflow.report.metrics",
    "PolicyError": "rlflow.errors",
    "Rollout": "rlflow.rollout",
    "RunConfig": "rlflow.config.schema",
    "RunFolder": "rlflow.run.script",
    "Trainer": "rlflow.trainer.base",
    "evaluate": "rlflow.run.evaluate",
    "export_policy": "rlflow.run.export",
    "load_config": "rlflow.config.schema",
    "make_batch": "rlflow.batching",
    "train": "rlflow.loop",
    **dict.fromkeys(
        (
            "Batch",
            "Episode",
            "Group",
            "PolicyOutput",
            "Segment",
            "Step",
            "StopReason",
            "Task",
            "Trajectory",
        ),
        "rlflow.types",
    ),
}

_NAMES = "rlflow.names"
"""Entry-point group of the public names that are defined outside the core."""

__all__ = [
    "Batch",
    "Environment",
    "Episode",
    "Group",
    "Metric",
    "PolicyError",
    "PolicyOutput",
    "Rollout",
    "RunConfig",
    "RunFolder",
    "Segment",
    "Step",
    "StopReason",
    "Task",
    "Trainer",
    "Trajectory",
    "check_environment",
    "evaluate",
    "export_policy",
    "load_config",
    "make_batch",
    "train",
]


def __getattr__(name: str) -> Any:
    """The public name from its module (PEP 562), so that `import rlflow` stays light."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
        value = _registered(name)
    else:
        raise AttributeError(f"module 'rlflow' has no attribute '{name}'")
    globals()[name] = value
    return value


def _registered(name: str) -> Any:
    """A public name that a tool around the core defines. Raises AttributeError where none does."""
    from importlib import metadata

    for entry in metadata.entry_points(group=_NAMES, name=name):
        return entry.load()
    raise AttributeError(f"module 'rlflow' has no attribute '{name}': install rlflow again")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
