"""Qwen2 and Qwen2.5."""

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT, QKV_BIAS
from rlflow.models.tiny_sizes import dense_sizes

FAMILY = ModelFamily(
    rules=(EMBEDDING, *DENSE_LAYER, QKV_BIAS, FINAL_NORM, OUTPUT),
    tiny=dense_sizes,
)
