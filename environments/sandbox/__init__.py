"""Programs of others, confined: a room of its own, which knows neither agents nor training."""

from rlflow_environments.sandbox.box import Sandbox
from rlflow_environments.sandbox.bubblewrap import (
    Confines,
    SandboxError,
    SandboxKilledError,
    make_confines,
)
from rlflow_environments.sandbox.limits import Limits, ProgramResult

__all__ = [
    "Confines",
    "Limits",
    "ProgramResult",
    "Sandbox",
    "SandboxError",
    "SandboxKilledError",
    "make_confines",
]
