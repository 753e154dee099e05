"""rlflow: reinforcement learning for LLM agents. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.batching import make_batch
    from rlflow.checks.environments import check_environment
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
    "check_environment": "rlflow.checks.environments",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'rlflow' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
