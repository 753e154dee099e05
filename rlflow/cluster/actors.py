"""Starts and ends Ray actors, trainer ranks and rollout workers alike; says what they failed of."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.cluster.session import first_line
from rlflow.components import file_modules
from rlflow.errors import RLFlowError

logger = logging.getLogger(__name__)


class ActorDied(RLFlowError):
    """The process of a trainer rank, or of a rollout worker, is gone."""


def start_actor(
    kind: type, options: Mapping[str, Any], beside: Sequence[str], *arguments: Any
) -> Any:
    """An actor, which nobody restarts. beside: Ray's groups of what it is asked while it works,
    each a thread of its own."""
    import ray

    send_file_modules()
    # The groups are in no stub of Ray's
    groups: dict[str, Any] = {"concurrency_groups": dict.fromkeys(beside, 1)}
    return ray.remote(max_restarts=0, **groups, **options)(kind).remote(*arguments)


def end_actor(actor: Any) -> None:
    """Ends the process; a stopped one too, in some seconds. Of no effect where it has ended."""
    import ray

    if ray.is_initialized():  # else the user was faster
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)


def send_file_modules() -> None:
    """Has what was loaded of files pickled whole, as it is known elsewhere under no name."""
    import ray

    for module in file_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def why_failed(error: BaseException, who: str) -> RLFlowError:
    """What a call of an actor raised, in one line; the traceback of the unexpected goes to the
    log."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RLFlowError):
            return cause
        logger.error("%s failed:\n%s", who, error)
        return RLFlowError(f"{who}: {type(cause).__name__}: {first_line(cause)}")
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        lost = "is out of reach (its machine or the network between, or killed for memory?)"
    else:
        lost = "died (killed for memory?)"
    return ActorDied(f"{who} {lost}: {first_line(error)}")
