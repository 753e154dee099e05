"""Mixtral: every layer has experts, under names of its own; the weights of a token's experts always
add up to one."""

from functools import partial

from rlflow.models.entries import experts_of, sliding_window
from rlflow.models.family import Family
from rlflow.models.layer_rules import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, sparse_mlp

EXPERTS = sparse_mlp("layer.block_sparse_moe.", ("w1", "w3", "w2"))

FAMILY = Family(
    rules=(EMBEDDING, *ATTENTION, *EXPERTS, FINAL_NORM, OUTPUT),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    window=sliding_window,
    experts=partial(experts_of, normalized=True),
)
