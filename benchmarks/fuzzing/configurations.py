"""Random values, overrides and bytes as a configuration: a run of two steps comes of it, or one line that says why not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from fuzzing import nonsense
from fuzzing.cases import Wrong, command, forked
from fuzzing.task import settings, write_model

DEADLINE_S = 90.0
KEPT = ("run.directory", "run.name", "run.overwrite", "cluster.ranks")
"""Not tried: what would write elsewhere, and what starts so many processes as it says."""
MOST = 1000
"""Larger counts are work that was asked for, not a hang."""


class Configurations:
    """`rlflow train` on them."""

    def prepare(self, folder: Path) -> None:
        from rlflow import components
        from rlflow.config.loading import to_dict
        from rlflow.config.schema import load_config
        from rlflow.trainer import optimizers, schedule

        self._kinds = {
            "engine": components.ENGINE,
            "advantage": components.ADVANTAGE,
            "losses": components.LOSS,
            "aggregate": components.AGGREGATE,
            "filters": components.FILTER,
            "transforms": components.TRANSFORM,
            "curator": components.CURATOR,
            "sinks": components.SINK,
            "optimizer": optimizers.OPTIMIZER,
            "schedule": schedule.SCHEDULE,
        }
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.names()}
        self._model = write_model(folder / "model")
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(settings(self._model, folder)), encoding="utf-8")
        self._values = {
            key: value for key, value in _leaves(to_dict(load_config(path))) if key not in KEPT
        }

    def case(self, draw: random.Random, folder: Path) -> bool:
        values, overrides = settings(self._model, folder), []
        changed: list[tuple[str, Any]] = []
        config, kind = folder / "config.yaml", draw.random()
        if kind < 0.4:
            for key in draw.choices(list(self._values), k=draw.choice([1, 1, 2])):
                changed.append((key, self._value(key, draw)))
                _set(values, key, changed[-1][1])
        elif kind < 0.7:
            for key in draw.choices(list(self._values), k=draw.choice([1, 1, 2])):
                changed.append((key, self._value(key, draw)))
                overrides.append(f"{key}={_as_text(changed[-1][1], draw)}".replace("\x00", ""))
        text = _flow(values).encode()
        if kind >= 0.7:
            text = nonsense.damaged(yaml.safe_dump(values).encode(), draw)
            if b"directory" not in text or str(folder).encode() not in text:
                return False  # it would write elsewhere
            changed = [("bytes", text)]
        config.write_bytes(text)
        arguments = ["train", "--config", str(config), *overrides]
        try:
            accepted = forked(command([*arguments, "--dry-run"]), folder, DEADLINE_S).check()
            nan = [
                key
                for key, value in changed
                if accepted and isinstance(value, float) and not math.isfinite(value)
            ]
            if nan:
                raise Wrong(f"accepted: {changed}")
            if (
                accepted
                and not any(key.startswith("cluster") for key, _ in changed)
                and b"cluster" not in text
            ):
                accepted = forked(command(arguments), folder, DEADLINE_S).check()
        except Wrong as found:
            raise Wrong(f"{changed!s:.800}: {found}") from None
        return accepted

    def close(self) -> dict[str, float]:
        return {}

    def _value(self, key: str, draw: random.Random) -> Any:
        """Anything, or something of the kind that stands there."""
        now, last = self._values[key], key.rpartition(".")[2]
        if last in self._kinds and draw.random() < 0.6:
            component = self._component(self._kinds[last], draw)
            return [component] if isinstance(now, list) else component
        near: dict[type, tuple[Any, ...]] = {
            bool: (True, False),
            int: (0, 1, 2, 3, 5, 7, 16, -1),
            float: (0, 0.0, 0.25, 0.5, 1, 1.0, 2, 1e-8, 1e-3, 1e6, -0.5),
            str: (
                "train",
                "val",
                "fuzz",
                "adamw",
                "bfloat16",
                "float32",
                "none",
                "plain",
                "cosine",
                "tensorboard",
            ),
        }
        if draw.random() < 0.6 and type(now) in near:
            return draw.choice(near[type(now)])
        return _modest(nonsense.value(draw))

    @staticmethod
    def _component(kind: Any, draw: random.Random) -> dict[str, Any]:
        """One of the built-in ones, with some option at some value."""
        name = draw.choice(kind.names())
        options = [option for option in kind.options(name) if option not in ("path", "directory")]
        numbers = (0, 1, 2, -1, 0.5, 1e-6, 1.5, 1e6, True, "none")
        chosen = draw.sample(options, min(len(options), draw.choice([0, 1, 1, 2])))
        return {
            "name": name,
            **{option: draw.choice([*numbers, _modest(nonsense.value(draw))]) for option in chosen},
        }


def _leaves(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in a configuration, components' options too."""
    found = []
    for key, value in values.items():
        found.append((before + key, value))
        if isinstance(value, dict):
            found += _leaves(value, f"{before}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += _leaves(value[0], f"{before}{key}.0.")
    return [(key, value) for key, value in found if "." in key or key == "environment"]


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[last] = value


def _modest(value: Any) -> Any:
    return (
        MOST
        if isinstance(value, int) and not isinstance(value, bool) and MOST < value < 10**9
        else value
    )


def _as_text(value: Any, draw: random.Random) -> str:
    """A value as a user may write it on the command line."""
    if isinstance(value, str):
        return value
    return _flow(value) if draw.random() < 0.8 else str(value)


def _flow(value: Any) -> str:
    """A value as YAML's flow style: JSON, but for numbers that JSON does not have."""
    return json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")
