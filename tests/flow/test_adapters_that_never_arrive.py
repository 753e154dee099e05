"""Runs whose adapters do not reach what samples: each ends with one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.loop import train
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Pairs, Weights, each_weight
from rlflow.trainer.megatron.megatron_trainer import MegatronTrainer
from tests.flow.letters import letters_config

HERE = Path(__file__).resolve()
SHORT = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=16", "run.steps=9", "evaluation.at_start=false",
         "evaluation.every_steps=0", "checkpoint.every_steps=0", "checkpoint.export=false", "metrics.picture=false",
         "run.deterministic=true", "trainer.lora={rank: 4, alpha: 8}", "trainer.lr=2e-2")  # fmt: skip


class NotSent(EmbeddedEngine):
    """Says that it has new adapters, and has none."""

    async def load_weights(self, weights: Weights, version: int) -> None:
        async for _ in each_weight(weights):
            pass
        self._scheduler.runner.version = version


class Older(EmbeddedEngine):
    """Takes the first adapters again and again."""

    first: Pairs = []

    async def load_weights(self, weights: Weights, version: int) -> None:
        sent = [(name, tensor.clone()) async for name, tensor in each_weight(weights)]
        self.first = self.first or sent
        await super().load_weights(self.first, version)


class OtherScale(EmbeddedEngine):
    """Multiplies by another number than the trainer."""

    async def load_weights(self, weights: Weights, version: int) -> None:
        sent = [pair async for pair in each_weight(weights)]
        scaled = [(name, 2 * tensor if name == "lora_scale" else tensor) for name, tensor in sent]
        await super().load_weights(scaled, version)


class Unused(EmbeddedEngine):
    """Has the right adapters, says so, and samples without them, or with another scale."""

    factor = 0.0

    async def load_weights(self, weights: Weights, version: int) -> None:
        await super().load_weights(weights, version)
        self._sent = await super().weights_digest()
        self._model.adapters[""].scale *= self.factor

    async def weights_digest(self) -> str:
        return self._sent


class Overdone(Unused):
    factor = 3.0


class StaleTrainer(MegatronTrainer):
    """Trains adapters, and sends those of the start."""

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(self, "_first"):
            self._first = list(super().adapters())
        return iter(self._first)


HASH = r"weight sync: after version \d the engine's tensors hash to .*, those sent to "
EFFECT = (
    r"weight sync: of what the adapters change in the log-probs of \d+ tokens .* the engine has "
)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("rollout.engine={here}:NotSent", HASH),
        ("rollout.engine={here}:Older", HASH),
        ("rollout.engine={here}:OtherScale", HASH),
        ("rollout.engine={here}:Unused", EFFECT),
        ("rollout.engine={here}:Overdone", EFFECT),
        ("trainer.backend={here}:StaleTrainer", EFFECT),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_run_ends_with_one_sentence(
    model: Path, tmp_path: Path, fault: str, message: str, dtype: str
) -> None:
    asked = (fault.format(here=HERE), f"model.dtype={dtype}")
    with pytest.raises(RolloutError, match=message) as caught:
        train(letters_config(model, tmp_path, *SHORT, *asked))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_run_without_a_fault_goes_on(model: Path, tmp_path: Path, dtype: str) -> None:
    summary = train(letters_config(model, tmp_path, *SHORT, f"model.dtype={dtype}"))
    assert summary["steps"] == 9
