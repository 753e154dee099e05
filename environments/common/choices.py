"""Options that name some of what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rlflow.errors import ConfigError, did_you_mean


def chosen(names: Iterable[str], known: Collection[str], where: str, what: str) -> list[str]:
    """The names, each of them known. Raises ConfigError, also where there are none."""
    found = list(names)
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{where}: no {what} '{name}'; expected some of {', '.join(known)}."
                f"{did_you_mean(str(name), known)}"
            )
    if not found:
        raise ConfigError(f"{where}: expected names, found none.")
    return found
