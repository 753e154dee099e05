"""A plug-in of vLLM for tests: after each step of its engine it sleeps; what is computed stays vLLM's own."""

from __future__ import annotations

import functools
import time
from typing import Any

STEP_S = 0.008


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    from vllm.v1.engine.core import EngineCore

    for name in ("step", "step_with_batch_queue"):
        step = getattr(EngineCore, name)
        if not hasattr(step, "__wrapped__"):
            setattr(EngineCore, name, _paced(step))


def _paced(step: Any) -> Any:
    @functools.wraps(step)
    def paced(self: Any) -> Any:
        done = step(self)
        time.sleep(STEP_S)
        return done

    return paced
