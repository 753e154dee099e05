"""The model families, one file each: a file's name is the `model_type` of config.json, and what it
knows of the family is its `FAMILY`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from rlflow.models.family import ModelFamily


def read_families() -> dict[str, ModelFamily]:
    """The `FAMILY` of each file in this folder, by the file's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in names}


FAMILIES = read_families()
"""By `model_type`. Scripts may add families."""

SHIPPED = frozenset(FAMILIES)
"""Without those that scripts add."""
