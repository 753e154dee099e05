"""A model with more rows than its tokenizer has ids: no id beyond is sampled, and the trainer's distribution is the
engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import PPOClipLoss
from rlflow.batching import token_batch
from rlflow.errors import ConfigError, DataError
from rlflow.models.vocabulary import known_vocab
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.vllm.completions import sampling_arguments, unknown_ids
from rlflow.run.export import check_export
from rlflow.trainer.base import Trainer
from rlflow.types import Batch
from tests.fixtures import tiny_model
from tests.reference import ORACLE

ROWS = 512
PROMPT = list(range(3, 12))
TEMPERATURE = 0.7
BACKENDS = ("megatron", ORACLE)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("padded"), vocab_size=ROWS)


@pytest.fixture(scope="module")
def known(padded: Path) -> int:
    known = known_vocab(padded, ROWS)
    assert 250 < known < ROWS - 60
    return known


@pytest.fixture(scope="module")
def sampled(padded: Path) -> list[Completion]:
    engine = EmbeddedEngine(padded)

    async def together() -> list[Completion]:
        asked = (
            engine.generate(PROMPT, Sampling(32, TEMPERATURE, seed=seed)) for seed in range(24)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(together())


def batch_of(sampled: list[Completion]) -> tuple[Batch, Tensor]:
    """(the whole sequences as a batch, log-probs of the engine)."""
    batch = token_batch([[*PROMPT, *one.tokens] for one in sampled])
    said = torch.zeros(batch.tokens.shape)
    for row, one in enumerate(sampled):
        said[row, len(PROMPT) : len(PROMPT) + len(one.tokens)] = torch.tensor(one.logprobs)
    mask = said != 0
    return batch.replace(
        temperatures=torch.full((len(batch),), TEMPERATURE),
        loss_mask=mask,
        logprobs=said,
        advantages=torch.randn(said.shape, generator=torch.Generator().manual_seed(0)) * mask,
        weights=mask / mask.sum(),
        logprobs_known=torch.ones(len(batch), dtype=torch.bool),
    ), said


def oracle(path: Path, tokens: Tensor, known: int) -> Tensor:
    """(B, T - 1) of transformers, over the tokenizer's ids alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1, :known] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).float()


def test_no_id_beyond_the_tokenizer_is_sampled(
    padded: Path, known: int, sampled: list[Completion]
) -> None:
    """One of four would be at random weights."""
    tokens = [token for one in sampled for token in one.tokens]
    assert len(tokens) > 500 and max(tokens) < known
    batch, said = batch_of(sampled)
    expected = oracle(padded, batch.tokens, known)[said[:, 1:] != 0]
    torch.testing.assert_close(said[said != 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS, ids=("megatron", "reference"))
def test_the_trainer_s_distribution_is_the_engine_s(
    padded: Path, known: int, sampled: list[Completion], backend: str
) -> None:
    batch, said = batch_of(sampled)
    trainer = Trainer.from_pretrained(padded, backend, lr=1e-2)
    scores = trainer.score(batch, want=("logprobs", "entropy"), top_k=known)
    gap = (scores["logprobs"] - said)[batch.loss_mask].abs().max()
    assert gap < 1e-5
    likeliest = scores["top_logprobs"][batch.loss_mask]
    torch.testing.assert_close(likeliest.exp().sum(-1), torch.ones(len(likeliest)))
    assert int(scores["top_ids"].max()) < known
    entropy = -(likeliest.exp() * likeliest).sum(-1)
    torch.testing.assert_close(scores["entropy"][batch.loss_mask], entropy, atol=1e-4, rtol=0)
    before = dict(trainer.weights())["lm_head.weight"]
    metrics = trainer.update(batch, PPOClipLoss())
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    after = dict(trainer.weights())["lm_head.weight"]
    assert not torch.equal(after[:known], before[:known])
    trainer.close()


@pytest.mark.parametrize("backend", BACKENDS, ids=("megatron", "reference"))
def test_ids_beyond_the_tokenizer_are_refused(padded: Path, known: int, backend: str) -> None:
    trainer = Trainer.from_pretrained(padded, backend)
    with pytest.raises(DataError, match=f"must be 0 to {known - 1} "):
        trainer.score(token_batch([[1, 2, known]]))
    trainer.close()


def test_the_export_of_a_padded_model_is_held_against_transformers(padded: Path) -> None:
    trainer = Trainer.from_pretrained(padded)
    assert check_export(trainer, padded) < 1e-4
    trainer.close()


def test_a_frozen_teacher_has_its_own_tokenizer_s_ids(padded: Path, known: int) -> None:
    for backend in BACKENDS:
        trainer = Trainer.from_pretrained(padded, backend)
        trainer.load_frozen("teacher", padded)
        batch = token_batch([[1, 2, 3, 4]])
        found = trainer.score(batch, "teacher", top_k=known)["top_logprobs"][0, 1:]
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(3))
        trainer.close()


def test_vllm_is_told_which_ids_are_none(padded: Path, known: int, tmp_path: Path) -> None:
    """By a bias under which none of them is ever drawn: exp(-100) of a token."""
    unknown = unknown_ids(padded, ROWS)
    assert unknown == range(known, ROWS)
    asked: dict[str, Any] = sampling_arguments(Sampling(4), 4, (), 0, unknown)
    assert asked["logit_bias"] == {str(token): -100.0 for token in range(known, ROWS)}
    assert "logit_bias" not in sampling_arguments(Sampling(4), 4, (), 0, unknown_ids(padded, known))
    assert not unknown_ids(padded, None) and not unknown_ids(tmp_path, ROWS)
    with pytest.raises(ConfigError, match="1024 at the most"):
        unknown_ids(padded, known + 1025)
