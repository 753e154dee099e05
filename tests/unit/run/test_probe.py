"""A run over an engine that cannot hash its weights: every sync is probed, and an engine that kept the old ones is found out."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.loop import train
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.probe_rule import spacing
from rlflow.run.open import open_run
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE

FEW = ("run.steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "evaluation.questions=4",
       "evaluation.final_questions=4", "evaluation.at_start=false", "metrics.picture=false", "checkpoint.export=false",
       f"trainer.backend={ORACLE}", "trainer.lr=0.1")  # fmt: skip


class Unhashed(EmbeddedEngine):
    """The embedded engine, did it not know its weights."""

    hashes_weights = False


class Forgetful(Unhashed):
    """Takes new weights and goes on with the old ones, under the new version."""

    async def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        version: int,
    ) -> None:
        mine = [(name, tensor.clone()) for name, tensor in self._model.named_weights()]
        await super().load_weights(weights, version)
        await super().load_weights(mine, version)


class Fixed(EmbeddedEngine):
    """Keeps the weights that it has."""

    takes_weights = False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model"))


def test_a_run_probes_an_engine_that_cannot_hash_its_weights(model: Path, tmp_path: Path) -> None:
    config = letters_config(model, tmp_path, *FEW, f"rollout.engine.name={__name__}:Unhashed")
    with open_run(config) as run:
        assert run.engines.probe is not None and len(run.engines.probe.prompts) == 4
    assert (
        train(
            letters_config(
                model, tmp_path / "whole", *FEW, f"rollout.engine.name={__name__}:Unhashed"
            )
        )["steps"]
        == 2
    )
    with open_run(letters_config(model, tmp_path / "hashed", *FEW)) as run:
        assert run.engines.probe is None


def test_in_bfloat16_a_run_compares_many_tokens(model: Path, tmp_path: Path) -> None:
    options = (*FEW, f"rollout.engine.name={__name__}:Unhashed", "model.dtype=bfloat16")
    with open_run(letters_config(model, tmp_path, *options)) as run:
        assert run.engines.probe is not None and run.engines.probe.step == spacing(
            torch.bfloat16, 0.7
        )
        assert len(run.engines.probe.prompts) == 16 and 16 * run.engines.probe.max_tokens == 256


def test_an_engine_that_kept_the_old_weights_ends_the_run(model: Path, tmp_path: Path) -> None:
    config = letters_config(model, tmp_path, *FEW, f"rollout.engine.name={__name__}:Forgetful")
    with pytest.raises(
        RolloutError, match=r"engine and trainer differ by .* nats on a token of the probe"
    ):
        train(config)


def test_an_engine_that_takes_no_weights_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    config = letters_config(model, tmp_path, *FEW, f"rollout.engine.name={__name__}:Fixed")
    with pytest.raises(
        ConfigError,
        match=r"rollout\.engine: Fixed takes no weights: it serves evaluation, not training",
    ):
        train(config)
    assert not list(tmp_path.iterdir())
