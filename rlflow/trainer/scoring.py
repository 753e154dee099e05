"""Shared by every trainer's `score`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlflow.errors import ConfigError, DataError, RLFlowError, did_you_mean
from rlflow.types import TEACHER_TOP_IDS, Batch


def empty_scores(batch: Batch, want: Sequence[str], top_k: int) -> dict[str, Tensor]:
    """Zeros in the shapes of what `Trainer.score` answers."""
    scores = {name: torch.zeros(batch.tokens.shape) for name in want}
    if top_k:
        shape = (*batch.tokens.shape, top_k)
        scores |= {
            "top_ids": torch.zeros(shape, dtype=torch.int64),
            "top_logprobs": torch.zeros(shape),
        }
    return scores


def teacher_top_ids(batch: Batch) -> Tensor:
    """(B, T, k) the ids whose log-probs a loss needs. Raises RLFlowError where the batch has
    none."""
    if TEACHER_TOP_IDS not in batch.extras:
        raise RLFlowError(
            f"loss: it needs top_logprobs, of the ids in the batch's extras['{TEACHER_TOP_IDS}'], "
            "found none; a teacher with top_k fills them (algorithm.teacher.top_k)."
        )
    return batch.extras[TEACHER_TOP_IDS]


def check_tokens(tokens: Tensor, vocab: int) -> None:
    """Raises DataError for ids that the policy gives no probability (`known_vocab`)."""
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab:
        raise DataError(
            f"batch: token ids must be 0 to {vocab - 1} (what the policy's tokenizer has), found "
            f"{lowest} to {highest}: another model sampled them, or an engine that does not leave "
            "out ids that no token has."
        )


def check_top_k(top_k: int, vocab: int) -> None:
    """Raises ConfigError for more tokens than the policy's vocabulary has."""
    if not 0 <= top_k <= vocab:
        raise ConfigError(
            f"score: top_k must be 0 to {vocab}, the policy's vocabulary; found {top_k}."
        )


def unknown_model(name: str, taken: Iterable[str]) -> ConfigError:
    """The error for a model to score with that is neither the policy nor one of `taken`."""
    known = ["policy", *taken]
    return ConfigError(
        f"trainer.score: there is no model '{name}'; known: {', '.join(known)}. Call "
        f"snapshot('{name}') first, or load_frozen.{did_you_mean(name, known)}"
    )


def check_new_name(call: str, name: str, taken: Iterable[str]) -> None:
    """Raises ConfigError for the name of a snapshot or frozen model that means something already:
    `policy` is the model in training."""
    known = ["policy", *taken]
    if name in known:
        raise ConfigError(
            f"{call}: '{name}' is taken; choose a name other than {', '.join(known)}."
        )
