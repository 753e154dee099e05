"""Encoders by name and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.components import Kind, check_options
from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.base import Encoder

ENCODER = Kind("encoder", "rlflow_environments.retrieval.encoders", reserved=("passages",))
"""A class or function of `passages`, the corpus that it learns from, where it does, and options."""


def make_encoder(component: str | Mapping[str, Any], corpus: Sequence[Passage] | None = None) -> Encoder:
    """An encoder: `hashed` (built in; learns word counts from `corpus`), one of an installed package, `package.module:Name` or
    `file.py:Name`; any other name is a model folder or a hub name. With options.

    {"name": "models/e5-base-v2", "device": "cuda"}, {"name": "hashed", "dimensions": 384}, or just the name.
    Raises ConfigError, ModelError, MissingPackageError.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"encoder.name: expected '{ENCODER.names()[0]}', a model folder or a hub name, found {name!r}.")
    if name not in ENCODER.names() and (":" not in name or Path(name).expanduser().is_dir()):
        return _model(name, {key: value for key, value in options.items() if key != "name"})
    target, keywords = ENCODER.complete(options, passages=corpus)
    if corpus is None and "passages" in keywords:
        raise ConfigError(f"encoder {name}: it counts the words of a corpus, and none is given.")
    return target(**keywords)


def _model(path: str, options: Mapping[str, Any]) -> Encoder:
    from rlflow_environments.retrieval.encoders.transformer import TransformerEncoder

    checked = check_options(options, TransformerEncoder, where=f"encoder {path}", reserved=("path",))
    return TransformerEncoder(path, **checked)
