"""The Trainer interface, and how one is made from a HuggingFace directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.components import TRAINER
from rlflow.errors import ConfigError
from rlflow.trainer.options import TrainerOptions
from rlflow.types import Batch, Loss, LossResult, PolicyOutput

LossFunction = Callable[[PolicyOutput, Batch], LossResult]
"""(PolicyOutput, Batch) -> per-token loss (B, T) and metrics, (B, T) each. A `Loss` says besides what it `needs`."""


class Trainer(ABC):
    """Holds the policy, its optimizer and frozen copies of it. Every method is a collective: all ranks call it with the
    same arguments and get the same answers."""

    @staticmethod
    def from_pretrained(path: str | Path, backend: str = "megatron", **options: Any) -> Trainer:
        """A trainer over the weights of a HuggingFace directory. backend: megatron, reference (one device, plain torch), one of
        an installed package, `package.module:Name` or `file.py:Name`. options: those of `TrainerOptions`, dtype, seed,
        trust_remote_code. Raises ConfigError."""
        return TRAINER.resolve(backend, "trainer.backend")(path, **options)

    @classmethod
    def check_options(cls, options: TrainerOptions, ranks: int = 0) -> None:
        """Raises ConfigError for what this backend cannot do."""

    @abstractmethod
    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",), top_k: int = 0
    ) -> dict[str, Tensor]:
        """Without gradients: {name: (B, T) float32 on the CPU}; position t scores token t, at the row's temperature.
        model: policy, or the name of a snapshot or of a frozen model. want: logprobs, entropy. top_k: `top_ids` (B, T, k) too,
        the likeliest tokens in the place of each, and `top_logprobs`. Raises ConfigError for a k above the vocabulary."""

    @abstractmethod
    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        """One optimizer step that minimizes sum(weights * loss). Returns loss, gradient_norm, lr and the loss's metrics, each
        reduced as the loss says: the mean under the weights, or the maximum or sum over the trained tokens."""

    @abstractmethod
    def snapshot(self, name: str) -> None:
        """Freezes a copy of today's policy under a name (reference, proximal); it is part of the checkpoint."""

    def load_frozen(self, name: str, path: str | Path) -> None:
        """Loads the model of a HuggingFace directory beside the policy, for `score` alone. It may have another size and another
        family. It is not part of the checkpoint. Raises ConfigError where the trainer has none, it cannot be split as the policy
        is, or the name is in use; ModelError."""
        raise ConfigError(f"{type(self).__name__}: it cannot score another model than its policy; take trainer.backend=megatron.")

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Today's policy as (HuggingFace name, full tensor on the CPU) pairs, one at a time."""

    @abstractmethod
    def save(self, path: str | Path, step: int) -> None:
        """Writes model, optimizer, snapshots, RNG into the directory `path` (made here). Raises StorageError."""

    def begin_save(self, path: str | Path, step: int) -> None:
        """The first half of a save: may return once the state is copied, so that training goes on while the copy is
        written. Only `finish_save` makes a checkpoint of it. Raises StorageError."""
        self.save(path, step)

    def finish_save(self, wait: bool = True) -> bool:
        """Ends a begun save, if there is one; without `wait`, only if everything is written by now. Returns whether no save
        is under way any more. Raises StorageError where the save failed."""
        return True

    @abstractmethod
    def load(self, path: str | Path) -> int:
        """Restores what `save` wrote, into any layout; returns its step. Snapshots that it does not hold stay.

        Raises DamagedCheckpointError where a file is missing or not what was written, CheckpointError where the checkpoint
        is missing or another model's."""

    def peak_memory(self) -> dict[str, float]:
        """Where the trainer runs in processes of its own: {phase: the highest peak among them since the last call, GiB}."""
        return {}

    def close(self) -> None:
        """Frees process groups and memory."""
