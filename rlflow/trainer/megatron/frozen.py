"""Another model beside the policy, without gradients and optimizer: a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import ConfigError
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.models.vocabulary import known_vocab
from rlflow.trainer.megatron import offload
from rlflow.trainer.megatron.model import PolicyModel, build_model, named_parameters
from rlflow.trainer.megatron.model_weights import load_weights
from rlflow.trainer.megatron.world import World


@dataclass(frozen=True)
class FrozenModel:
    """A model of any size and family, split over the ranks as the policy is. vocab: ids that its
    tokenizer has. host: its weights, where they leave the GPU between two scores."""

    chunks: Sequence[PolicyModel]
    vocab: int
    host: dict[str, Tensor]

    @classmethod
    def load(
        cls, path: str | Path, world: World, dtype: torch.dtype, chunk_bytes: int, offloaded: bool
    ) -> FrozenModel:
        """The model of a HuggingFace directory. Raises ConfigError where the layout cannot split
        it, ModelError."""
        model = architecture(read_config(path))
        try:
            world.layout.check_frozen(model)
        except ConfigError as problem:
            raise ConfigError(f"{path}: it is split as the policy is: {problem}") from None
        vocab = known_vocab(path, model.vocab)
        chunks = build_model(model, world, dtype, chunk_bytes, vocab=vocab)
        load_weights(chunks, model, world, WeightFiles(path))
        for chunk in chunks:
            chunk.requires_grad_(False).eval()
        host = offload.to_host(dict(named_parameters(chunks))) if offloaded else {}
        for name, parameter in named_parameters(chunks) if offloaded else ():
            parameter.data = host[name]
        return cls(chunks, vocab, host)

    def on_device(self) -> AbstractContextManager[None]:
        """Inside, the weights are where the model computes."""
        return offload.swapped(dict(named_parameters(self.chunks)), self.host)
