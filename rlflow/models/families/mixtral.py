"""Mixtral: every layer has experts, under names of its own."""

from rlflow.models.family import Family
from rlflow.models.layer_rules import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, sparse_mlp

EXPERTS = sparse_mlp("layer.block_sparse_moe.", ("w1", "w3", "w2"))

FAMILY = Family(rules=(EMBEDDING, *ATTENTION, *EXPERTS, FINAL_NORM, OUTPUT))
