"""Encoders by name and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import ConfigError
from rlflow_environments.common.options import check_options
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.base import Encoder
from rlflow_environments.retrieval.encoders.ngram import NgramEncoder

BUILT_IN = "hashed"


def make_encoder(component: str | Mapping[str, Any], corpus: Sequence[Passage] | None = None) -> Encoder:
    """An encoder: `hashed` (built in; learns word counts from `corpus`), or a model folder or hub name, with options.

    {"name": "models/e5-base-v2", "device": "cuda"}, {"name": "hashed", "dimensions": 384}, or just the name.
    Raises ConfigError, ModelError, MissingPackageError.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"encoder.name: expected '{BUILT_IN}', a model folder or a hub name, found {name!r}.")
    if name == BUILT_IN:
        check_options(f"encoder {BUILT_IN}", options, (NgramEncoder,))
        if corpus is None:
            raise ConfigError(f"encoder {BUILT_IN}: it counts the words of a corpus, and none is given.")
        return NgramEncoder(corpus, **options)
    from rlflow_environments.retrieval.encoders.transformer import TransformerEncoder

    check_options(f"encoder {name}", options, (TransformerEncoder,))
    return TransformerEncoder(name, **options)
