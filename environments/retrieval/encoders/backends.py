"""What runs a transformer encoder: torch, or ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from rlflow.errors import ModelError, install_command, needing
from rlflow_environments.retrieval.devices import DTYPES, check_device

_ONNX_FILES = ("model.onnx", "onnx/model.onnx")
_ONNX_OUTPUTS = ("last_hidden_state", "token_embeddings")


class Backend(Protocol):
    """The model itself, on one device."""

    device: torch.device

    def hidden_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, L, hidden) float32 on the CPU or `device`. tokens, mask: (B, L) int64 on the CPU."""


class TorchBackend:
    """A transformers model in evaluation mode."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        """Raises ConfigError: unknown device; ModelError: no model there."""
        from transformers import AutoModel

        self.device = check_device(device)
        try:
            model = AutoModel.from_pretrained(folder, dtype=DTYPES[dtype])
        except (OSError, ValueError) as problem:
            raise ModelError(f"{folder}: cannot be loaded as an encoder: {problem}") from None
        if model.config.is_encoder_decoder:
            raise ModelError(
                f"{folder}: an encoder-decoder model; expected an encoder such as BERT."
            )
        self._model = model.to(self.device).eval()

    def hidden_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See Backend. A model that gives pooled vectors only (DPR) is one hidden state long."""
        output = self._model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))
        if getattr(output, "last_hidden_state", None) is None:
            return output.pooler_output[:, None].expand(-1, tokens.shape[1], -1)
        return output.last_hidden_state


class OnnxBackend:
    """An exported encoder. Its outputs must hold the last hidden states of every token."""

    def __init__(self, folder: Path, device: str) -> None:
        """Raises MissingPackageError without onnxruntime, ModelError: no file, or no hidden
        states."""
        with needing("encoder.backend onnx", install_command("onnx")):
            import onnxruntime
        self.device = check_device(device)
        path = next((folder / name for name in _ONNX_FILES if (folder / name).is_file()), None)
        if path is None:
            raise ModelError(
                f"{folder}: expected {' or '.join(_ONNX_FILES)}, found neither. Export the model, "
                "or set backend: torch."
            )
        cuda = self.device.type == "cuda"
        provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise ModelError(
                f"{path}: this onnxruntime has no {provider}. Install onnxruntime-gpu, or set "
                "device: cpu."
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self._inputs = {node.name for node in self._session.get_inputs()}
        outputs = [node.name for node in self._session.get_outputs()]
        self._output = next((name for name in _ONNX_OUTPUTS if name in outputs), None)
        if self._output is None:
            raise ModelError(
                f"{path}: expected an output named {' or '.join(_ONNX_OUTPUTS)}, found "
                f"{', '.join(outputs)}."
            )

    def hidden_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        given = {
            "input_ids": tokens,
            "attention_mask": mask,
            "token_type_ids": torch.zeros_like(tokens),
        }
        feed = {name: value.numpy() for name, value in given.items() if name in self._inputs}
        (hidden,) = self._session.run([self._output], feed)
        return torch.from_numpy(hidden)
