"""The proof of an export: what transformers computes from the directory is what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import ModelError
from rlflow.trainer.base import Trainer
from rlflow.types import Batch

ROWS, WIDTH = 4, 48


def check_export(trainer: Trainer, path: str | Path, tolerance: float = 1e-4) -> float:
    """The largest difference in log-probs (nats) between transformers on the exported directory, float32 on the CPU, and
    the trainer's policy, on fixed random tokens. Independent of the mapping tables that wrote it.

    Raises ModelError where the directory cannot be loaded or the difference exceeds `tolerance`; a bfloat16 trainer
    rounds in its own pass: 0.01 for a tiny model, more for wide ones."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path}: transformers cannot load the export ({str(error).splitlines()[0]}).") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    batch = _random_batch(model.config.vocab_size)
    with torch.no_grad():
        logits = model(batch.tokens).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    found = trainer.score(batch)["logprobs"][:, 1:]
    valid = torch.arange(1, WIDTH) < batch.lengths[:, None]
    difference = float((found - expected)[valid].abs().max())
    if not difference <= tolerance:  # NaN included
        raise ModelError(
            f"{path}: the export does not compute what the trainer does; log-probs differ by {difference:.2g} nats, "
            f"at most {tolerance:.2g} expected."
        )
    return difference


def _random_batch(vocab: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, WIDTH)
    nothing: Tensor = torch.zeros(shape)
    return Batch(
        tokens=torch.randint(0, vocab, shape, generator=draw),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        lengths=torch.tensor([WIDTH, WIDTH // 2, WIDTH // 3, WIDTH]),
        temperatures=torch.ones(ROWS),
    )
