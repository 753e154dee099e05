"""How large an encoder is, from its files alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from rlflow.errors import ModelError
from rlflow_environments.retrieval.encoders.ngram import NgramEncoder

_HASHED_BYTES = 300 << 20  # word counts and cached words of a large corpus
_LIBRARIES_BYTES = 350 << 20  # transformers and what it loads
_ACTIVATIONS = 1.5  # of a batch of passages, relative to the weights of a base model


def encoder_cost(component: Mapping[str, Any]) -> tuple[int, float]:
    """(dimensions, bytes in memory). Raises ModelError for a folder without a configuration."""
    name = component["name"]
    if name == "hashed":
        default = inspect.signature(NgramEncoder).parameters["dimensions"].default
        return int(component.get("dimensions", default)), float(_HASHED_BYTES)
    from rlflow_environments.retrieval.encoders.transformer import model_folder

    folder = model_folder(name)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as problem:
        raise ModelError(f"{folder}/config.json: expected a model's configuration ({problem}).") from None
    files = [path for pattern in ("*.safetensors", "*.bin", "**/*.onnx") for path in folder.glob(pattern)]
    weights = max((path.stat().st_size for path in files), default=0)
    width = int(config.get("hidden_size") or config.get("d_model") or config.get("dim"))
    return width, _LIBRARIES_BYTES + weights * (1 + _ACTIVATIONS)
