"""The contract of an algorithm's part as a program: a made-up batch looks for what breaks a run."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rlflow.algorithms.base import Advantage, Curator, Filter, Transform
from rlflow.algorithms.trial.first_call import make_part
from rlflow.algorithms.trial.sample_step import sample_tasks
from rlflow.components import (
    ADVANTAGE,
    AGGREGATE,
    CURATOR,
    FILTER,
    LOSS,
    PARTS,
    TRANSFORM,
    Kind,
)
from rlflow.errors import ConfigError
from rlflow.types import Loss

from .expectations import expecting
from .part_kinds import CHECKS
from .report import ContractReport

_CLASSES = {
    Advantage: ADVANTAGE,
    Loss: LOSS,
    Transform: TRANSFORM,
    Filter: FILTER,
    Curator: CURATOR,
}


def kind_of(name: str, kind: str | None = None) -> Kind:
    """The kind of a part: the given one, else by its name, its base class or its signature.

    Raises ConfigError where that leaves several or none."""
    if kind is not None:
        return PARTS[kind]
    knowing = [known for known in PARTS.values() if name in known.names()]
    if len(knowing) == 1:
        return knowing[0]
    if knowing or ":" not in name:
        found = ", ".join(known.name for known in knowing) or "none"
        raise ConfigError(
            f"{name}: expected a name of one kind, or module:Name, or file.py:Name; kinds that "
            f"know it: {found}. Say --kind {'|'.join(PARTS)}."
        )
    target = ADVANTAGE.resolve(name, "part")
    if isinstance(target, type):
        for base, found_kind in _CLASSES.items():
            if issubclass(target, base):
                return found_kind
    else:
        signature = inspect.signature(target)
        takes = [one for one in signature.parameters.values() if one.default is one.empty]
        returns = str(signature.return_annotation)
        if len(takes) == 2:
            return LOSS
        # An aggregate returns a Tensor too; few write one, and --kind says so
        for word, found_kind in (
            ("Batch", TRANSFORM),
            ("Group", FILTER),
            ("Tensor", ADVANTAGE),
        ):
            if word in returns:
                return found_kind
    advice = "annotate what it returns: Tensor (advantage), Batch (transform), list[Group] (filter)"
    if isinstance(target, type):
        advice = (
            "derive it from rlflow.types.Loss, or from Advantage, Transform, Filter or Curator of "
            "rlflow.algorithms.base"
        )
    raise ConfigError(
        f"{name}: its kind cannot be told from its signature; say --kind {'|'.join(PARTS)}, or "
        f"{advice}. A function of (output, batch) is a loss."
    )


def check_algorithm(name: str, kind: str | None = None, **keywords: Any) -> ContractReport:
    """Holds a part (a known name, `module:Name` or `file.py:Name`) against its contract.

    keywords: the part's own. Raises ConfigError where it cannot be made."""
    found = kind_of(name, kind)
    offered: dict[Kind, dict[str, Any]] = {
        AGGREGATE: {"tokens": 64},
        TRANSFORM: {"tokens": 64},
        CURATOR: {"tasks": sample_tasks(), "seed": 0},
        FILTER: {"seed": 0},
    }
    component = {"name": name, **keywords}
    make = functools.partial(make_part, found, component, name, **offered.get(found, {}))
    report = ContractReport()
    report.fact(f"{found.name} '{name}'")
    with expecting(report, f"making the {found.name}"):
        make()
    if report.passed:
        CHECKS[found](report, make)
    return report
