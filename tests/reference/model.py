"""The reference trainer's model: loading, a critic, and what whole logits say of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.errors import ModelError
from rlflow.models.huggingface import quiet_transformers
from rlflow.trainer.scoring import teacher_top_ids
from rlflow.types import Batch, PolicyOutput


class Critic(torch.nn.Module):
    """A language model with one number per token, (B, T), in place of the logits; the layer that
    gives it starts as 0."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        # Of that name, its parameters are called as in the language model
        self.model = policy.get_decoder()
        self.output_layer = torch.nn.Linear(policy.config.hidden_size, 1)
        for parameter in self.output_layer.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, **arguments: Any) -> Tensor:
        return self.output_layer(self.model(**arguments).last_hidden_state).squeeze(-1)


def load_model(path: str | Path, trust_remote_code: bool = False) -> torch.nn.Module:
    """The HuggingFace model of a local directory in float32, without dropout.

    Raises ModelError where the directory is no model, or its files lack a parameter (transformers
    would draw it at random)."""
    if not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"model.path: expected a HuggingFace directory with config.json, found none at '{path}'"
        )
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: transformers cannot load this model: {reason}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{path}: the weight files lack {len(missing)} parameters, the first is {missing[0]}"
        )
    # transformers withholds the gradient of the padding token's embedding. A policy may sample that
    # token (it often is the end token too), and no position of real padding is ever trained, so
    # here it learns like any other.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def policy_output(
    logits: Tensor, batch: Batch, want: frozenset[str], wanted: Tensor | None = None
) -> PolicyOutput:
    """Log-probs, and what is wanted besides, from next-token logits (B, T, V): logits at t - 1
    describe token t; position 0, padding and what is not wanted (B, T) are 0.

    Logits are divided by the row's temperature; a temperature of 0 (greedy) counts as 1.
    """
    temperatures = torch.where(batch.temperatures > 0, batch.temperatures, 1.0)
    log_softmax = (logits[:, :-1].float() / temperatures[:, None, None]).log_softmax(dim=-1)
    chosen = log_softmax.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    spread = top = None
    if "entropy" in want:
        spread = at_tokens(-(log_softmax.exp() * log_softmax).sum(dim=-1), batch, wanted)
    if "top_logprobs" in want:
        top = at_tokens(log_softmax.gather(-1, teacher_top_ids(batch)[:, 1:]), batch, wanted)
    return PolicyOutput(at_tokens(chosen, batch, wanted), spread, top_logprobs=top)


def at_tokens(values: Tensor, batch: Batch, wanted: Tensor | None) -> Tensor:
    """(B, T - 1, ...), position t - 1 of which describes token t -> (B, T, ...); position 0,
    padding and what is not wanted are 0."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    real = positions < batch.lengths[:, None]
    real = real if wanted is None else real & wanted
    deeper = values.dim() - 2
    placed = F.pad(values, (*(0 for _ in range(2 * deeper)), 1, 0))
    return torch.where(real.reshape(*real.shape, *(1 for _ in range(deeper))), placed, 0.0)
