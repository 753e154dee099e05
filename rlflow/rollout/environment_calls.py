"""What is asked of an environment outside of episodes: a failure of its is one line, and costs no more than it must."""

from __future__ import annotations

import logging

from rlflow.environment import Environment
from rlflow.errors import EnvironmentContractError, RLFlowError

logger = logging.getLogger(__name__)


def reported(environment: Environment) -> dict[str, float]:
    """What the environment reports about the last collection. Raises EnvironmentContractError where it is no dict of numbers."""
    name = type(environment).__name__
    try:
        report = environment.report()
        return {str(key): float(value) for key, value in report.items()}
    except RLFlowError:
        raise
    except (Exception, SystemExit) as failure:
        raise EnvironmentContractError(
            f"{name}.report: expected a dict of numbers, found {type(failure).__name__}: {failure}. Fix it; RLFLOW_DEBUG=1 shows "
            "where."
        ) from failure


def shut_down(environment: Environment) -> None:
    """Lets the environment free what outlives episodes. One that cannot is a warning: the run that it belonged to has ended."""
    try:
        environment.shutdown()
    except (Exception, SystemExit) as failure:  # noqa: BLE001 -- others' code, as at the episode boundary
        told = "%s.shutdown failed, what it started may still be running: %s: %s"
        logger.warning(told, type(environment).__name__, type(failure).__name__, failure)
