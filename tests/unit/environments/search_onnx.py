"""A tiny BERT exported to ONNX."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModel

from tests.unit.environments.search_models import write_bert


class HiddenStates(torch.nn.Module):
    """The model with tensors in and out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def write_onnx(folder: Path) -> Path:
    """A model folder with weights for torch and `onnx/model.onnx`, for batches and lengths of any size."""
    write_bert(folder)
    (folder / "onnx").mkdir()
    example = torch.ones(2, 8, dtype=torch.int64)
    dimensions = {0: torch.export.Dim("batch", min=1, max=512), 1: torch.export.Dim("length", min=2, max=512)}
    torch.onnx.export(
        HiddenStates(AutoModel.from_pretrained(folder, attn_implementation="eager").eval()),
        (example, example),
        str(folder / "onnx" / "model.onnx"),
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_shapes=(dimensions, dimensions),
        dynamo=True,
        verbose=False,
    )
    return folder
