"""Mistral: attention looks back on a window unless config.json says null."""

from functools import partial

from rlflow.models.entries import sliding_window
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT

FAMILY = ModelFamily(
    rules=(EMBEDDING, *DENSE_LAYER, FINAL_NORM, OUTPUT),
    window=partial(sliding_window, default=4096),
)
