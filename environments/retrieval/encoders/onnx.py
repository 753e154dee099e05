"""Transformer encoders on ONNX Runtime: model.onnx or onnx/model.onnx of the model's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from rlflow.errors import ModelError, install_command, needing
from rlflow_environments.retrieval.devices import check_device

_FILES = ("model.onnx", "onnx/model.onnx")
_OUTPUTS = ("last_hidden_state", "token_embeddings")


class OnnxBackend:
    """An exported encoder. Its outputs must hold the last hidden states of every token."""

    def __init__(self, folder: Path, device: str) -> None:
        """Raises MissingPackageError without onnxruntime, ModelError: no such file, or no hidden states in it."""
        with needing("encoder.backend onnx", install_command("onnx")):
            import onnxruntime
        self.device = check_device(device)
        path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if path is None:
            raise ModelError(
                f"{folder}: expected {' or '.join(_FILES)}, found neither. Export the model, or set backend: torch."
            )
        provider = "CUDAExecutionProvider" if self.device.type == "cuda" else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise ModelError(
                f"{path}: this onnxruntime has no {provider}. Install onnxruntime-gpu, or set device: cpu."
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self._inputs = {node.name for node in self._session.get_inputs()}
        outputs = [node.name for node in self._session.get_outputs()]
        self._output = next((name for name in _OUTPUTS if name in outputs), None)
        if self._output is None:
            raise ModelError(f"{path}: expected an output named {' or '.join(_OUTPUTS)}, found {', '.join(outputs)}.")

    def hidden_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
        feed = {name: value.numpy() for name, value in given.items() if name in self._inputs}
        (hidden,) = self._session.run([self._output], feed)
        return torch.from_numpy(hidden)
