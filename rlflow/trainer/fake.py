"""A trainer that sleeps and publishes: to tune a rollout, and to try a schedule in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import CheckpointError, ConfigError
from rlflow.models.huggingface import iterate_weights
from rlflow.storage.files import read_json, write_json
from rlflow.trainer.base import LossFunction, Trainer, check_wanted
from rlflow.trainer.optimizers import OPTIMIZER
from rlflow.trainer.options import TrainerOptions
from rlflow.types import Batch, Loss
from rlflow.values import NonNegativeFloat

STATE = "fake_trainer.json"


@dataclass(frozen=True)
class Sleep:
    """What takes an optimizer's place (`trainer.optimizer`): seconds of an update, and per token of its rows; score_token_s: per
    token of rows that are scored."""

    update_s: NonNegativeFloat = 0.0
    token_s: NonNegativeFloat = 0.0
    score_token_s: NonNegativeFloat = 0.0


class FakeTrainer(Trainer):
    """Takes the keywords of every trainer, and learns nothing: `update` sleeps as `trainer.optimizer={name: sleep, ...}` says,
    `weights` gives those of the directory under every version, scores are the log-probs that the rows came with.

    So everything but the training is real: what is sampled, how old it is, weight syncs, checkpoints, metrics."""

    exports = False

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
        values: bool = False,
        **options: Any,
    ) -> None:
        given = TrainerOptions.of(options)
        self.check_options(given)
        self.path, self.values = Path(path), values
        self.sleep: Sleep = OPTIMIZER.build(given.optimizer)
        self.rate = given.learning_rate()
        self.updates = 0

    @classmethod
    def check_options(cls, options: TrainerOptions, ranks: int = 0) -> None:
        if ranks:
            raise ConfigError(f"cluster.ranks: the fake trainer sleeps in the run's own process; expected 0, found {ranks}.")
        made = OPTIMIZER.build(options.optimizer, "trainer.optimizer")
        if not isinstance(made, Sleep):
            raise ConfigError(
                f"trainer.optimizer: the fake trainer has no optimizer; expected {{name: sleep, update_s: 1.0}}, found "
                f"'{options.optimizer['name']}'."
            )

    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",), top_k: int = 0
    ) -> dict[str, Tensor]:
        if top_k:
            raise ConfigError("trainer.score: the fake trainer has no likeliest tokens; use trainer.backend=megatron.")
        check_wanted(want, self.values)
        time.sleep(self.sleep.score_token_s * float(batch.lengths.sum()))
        return {
            name: batch.logprobs.clone() if name == "logprobs" else torch.zeros_like(batch.logprobs) for name in want
        }

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        time.sleep(self.sleep.update_s + self.sleep.token_s * float(batch.lengths.sum()))
        rate = self.rate(self.updates)
        self.updates += 1
        return {
            "loss": 0.0,
            "gradient_norm": 0.0,
            "lr": rate,
            "tokens": float(batch.lengths.sum()),
            "microbatches": 1.0,
        }

    def snapshot(self, name: str) -> None:
        """Of weights that never change."""

    def load_frozen(self, name: str, path: str | Path) -> None:
        """Scores as the policy does."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iterate_weights(self.path)

    def save(self, path: str | Path, step: int) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        write_json(Path(path) / STATE, {"step": step, "updates": self.updates})

    def load(self, path: str | Path) -> int:
        if not (Path(path) / STATE).is_file():
            raise CheckpointError(f"{path}: not a checkpoint of the fake trainer; set trainer.backend as it was.")
        state = read_json(Path(path) / STATE)
        self.updates = int(state["updates"])
        return int(state["step"])
