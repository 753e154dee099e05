"""Mistral."""

from rlflow.models.family import Family
from rlflow.models.layer_rules import DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT

FAMILY = Family(rules=(EMBEDDING, *DENSE_LAYER, FINAL_NORM, OUTPUT))
