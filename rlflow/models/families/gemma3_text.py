"""Gemma 3, text alone: norms before and after attention and MLP, and layers with a window between
those that see everything."""

import dataclasses
from functools import partial
from typing import Any

from rlflow.models.entries import FULL, SLIDING, alternating_window
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    K_NORM,
    OUTPUT,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    Q_NORM,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes

MLP_NORM = dataclasses.replace(
    DENSE_MLP[0], sources=(("model.layers.{i}.pre_feedforward_layernorm.weight", "hidden"),)
)
BLOCKS = (*ATTENTION, Q_NORM, K_NORM, POST_ATTENTION_NORM, MLP_NORM, *DENSE_MLP[1:], POST_MLP_NORM)


def tiny(sizes: TinySizes) -> dict[str, Any]:
    return {
        **dense_sizes(sizes),
        "head_dim": sizes.head_dim,
        "query_pre_attn_scalar": 2 * sizes.head_dim,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }


FAMILY = ModelFamily(
    rules=(EMBEDDING, *BLOCKS, FINAL_NORM, OUTPUT),
    defaults={
        "rope_theta": 1e6,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
    },
    activation="gelu_pytorch_tanh",
    zero_centered_norms=True,
    scaled_embedding=True,
    window=partial(alternating_window, default=4096, pattern=6, rope_theta=1e4),
    tiny=tiny,
)
