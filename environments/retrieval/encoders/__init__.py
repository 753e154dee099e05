"""Encoders: texts to vectors. The built-in one needs no download; E5, BGE and sentence-transformers
models run on torch."""

from __future__ import annotations

from rlflow_environments.retrieval.encoders.make import Encoder, make_encoder
from rlflow_environments.retrieval.encoders.ngram import NgramEncoder, split_words
from rlflow_environments.retrieval.encoders.rules import encoder_family

__all__ = ["Encoder", "NgramEncoder", "encoder_family", "make_encoder", "split_words"]

BUILT_IN = {"hashed": "rlflow_environments.retrieval.encoders.ngram:NgramEncoder"}
"""Encoders: name -> `module:Name`. Any other name is a model's."""
