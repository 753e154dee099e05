"""The start of several engines over vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from rlflow.errors import ConfigError
from rlflow.rollout.engine import Engine
from rlflow.rollout.vllm.queueing import QueueingEngine

E = TypeVar("E", bound=QueueingEngine)


def check_deterministic(deterministic: bool) -> None:
    """Raises ConfigError for what vLLM cannot do."""
    if deterministic:
        raise ConfigError(
            "rollout.engine: vLLM does not give equal bits in every run; set run.deterministic=false, or take another engine."
        )


def all_ready(making: Iterable[E], begin: Callable[[E], object] = lambda engine: None) -> list[Engine]:
    """Makes engines and waits until all of them are ready, `begin` done with each; where one fails, none is left."""
    made: list[E] = []
    try:
        for engine in making:
            made.append(engine)  # at once: those before one that fails are to be ended
        for engine in made:
            engine.wait_until_ready()
            begin(engine)
    except BaseException:
        for engine in made:
            engine.kill()
        raise
    return list(made)
