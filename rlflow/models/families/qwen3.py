"""Qwen3."""

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import DENSE_LAYER, EMBEDDING, FINAL_NORM, K_NORM, OUTPUT, Q_NORM

FAMILY = ModelFamily(rules=(EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, FINAL_NORM, OUTPUT))
