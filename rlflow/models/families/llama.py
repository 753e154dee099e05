"""Llama, with or without biases."""

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import BIASES, DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT

FAMILY = ModelFamily(rules=(EMBEDDING, *DENSE_LAYER, *BIASES, FINAL_NORM, OUTPUT))
