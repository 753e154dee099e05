"""Encoders by name and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlflow.components import Kind, check_options
from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Passage

ENCODER = Kind("encoder", "rlflow_environments.retrieval.encoders", reserved=("passages",))
"""A class or function of `passages`, the corpus that it learns from, where it does, and options."""


class Encoder(Protocol):
    """Texts to vectors: (N, dimensions) float32. A text's vector does not depend on the other texts
    of its batch, bit for bit for queries. A zero row: the text holds nothing to encode."""

    dimensions: int

    @property
    def description(self) -> dict[str, Any]:
        """What an index records: `family`, `sha256` of all that decides a vector, and what a person
        wants to know."""

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray: ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray: ...


def make_encoder(
    component: str | Mapping[str, Any], corpus: Sequence[Passage] | None = None
) -> Encoder:
    """An encoder: `hashed` (built in; learns word counts from `corpus`), one of an installed
    package, `package.module:Name` or `file.py:Name`; any other name is a model folder or a hub
    name. With options.

    {"name": "models/e5-base-v2", "device": "cuda"}, {"name": "hashed", "dimensions": 384}, or just
    the name. Raises ConfigError, ModelError, MissingPackageError.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"encoder.name: expected '{ENCODER.names()[0]}', a model folder or a hub name, found "
            f"{name!r}."
        )
    if is_model(name):
        from rlflow_environments.retrieval.encoders.transformer import TransformerEncoder

        del options["name"]
        checked = check_options(options, TransformerEncoder, where="encoder", reserved=("path",))
        return TransformerEncoder(name, **checked)
    target, keywords = ENCODER.complete(options, passages=corpus)
    if corpus is None and "passages" in keywords:
        raise ConfigError(f"encoder {name}: it counts the words of a corpus, and none is given.")
    return target(**keywords)


def is_model(name: str) -> bool:
    """Whether the name is that of a model, a folder or on the hub, and not of a class or
    function."""
    return name not in ENCODER.names() and (":" not in name or Path(name).expanduser().is_dir())
