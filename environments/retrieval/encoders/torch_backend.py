"""Transformer encoders on torch."""

from __future__ import annotations

from pathlib import Path

import torch

from rlflow.errors import ConfigError, ModelError, did_you_mean
from rlflow_environments.retrieval.devices import DTYPES, check_device


class TorchBackend:
    """A transformers model in evaluation mode."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        """Raises ConfigError: unknown device or dtype; ModelError: no model there."""
        from transformers import AutoModel

        if dtype not in DTYPES:
            raise ConfigError(
                f"encoder.dtype: expected one of {', '.join(DTYPES)}, found '{dtype}'.{did_you_mean(dtype, DTYPES)}"
            )
        self.device = check_device(device)
        try:
            model = AutoModel.from_pretrained(folder, dtype=DTYPES[dtype])
        except (OSError, ValueError) as problem:
            raise ModelError(f"{folder}: cannot be loaded as an encoder: {problem}") from None
        if model.config.is_encoder_decoder:
            raise ModelError(f"{folder}: an encoder-decoder model; expected an encoder such as BERT.")
        self._model = model.to(self.device).eval()

    def hidden_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See Backend. A model that gives pooled vectors only (DPR) is one hidden state long."""
        output = self._model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))
        if getattr(output, "last_hidden_state", None) is None:
            return output.pooler_output[:, None].expand(-1, tokens.shape[1], -1)
        return output.last_hidden_state
