"""A critic beside the policy, in both trainers: on several ranks in tests/dist/test_critic.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms import PPOClipLoss, SumLoss, ValueLoss
from rlflow.batching import lengthened
from rlflow.errors import CheckpointError, ConfigError, RLFlowError
from rlflow.models.huggingface import digest
from rlflow.trainer.base import ActorCritic, Trainer
from rlflow.types import Batch
from tests.reference import ORACLE
from tests.unit.trainer.batches import VOCAB, make_batch

CRITIC = {"lr": 1e-2}
LOSS = SumLoss((PPOClipLoss(), ValueLoss(clip=0.2)))


@pytest.fixture
def defaults() -> dict[str, Any]:
    """With Adam's usual eps an element with nearly no gradient moves by its rounding error divided by its own size."""
    return {"lr": 1e-3, "critic": CRITIC, "optimizer": {"name": "adamw", "eps": 1e-4}}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    return tiny_model(tmp_path_factory.mktemp("untied"), "qwen3", tokenizer=False, **sizes)


def make_targets(seed: int = 0) -> Batch:
    batch = make_batch(seed=seed)
    draw = torch.Generator().manual_seed(seed)
    returns = torch.where(batch.loss_mask, torch.randn(batch.tokens.shape, generator=draw), 0.0)
    return batch.replace(values=torch.zeros_like(returns), returns=returns)


def assert_same(found: dict[str, float], expected: dict[str, float], *but: str) -> None:
    for name in set(expected) - set(but):
        assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name


def values_of(trainer: Trainer, batch: Batch) -> torch.Tensor:
    return trainer.score(batch, want=("values",))["values"]


def test_values_and_updates_are_those_of_a_plain_torch_model(make: Any, untied: Path) -> None:
    """Padded, packed, and a row at a time, of a model with an output layer of its own (a tied one: tests/dist). The head starts
    as 0, so the later updates are those that show the gradient of the trunk."""
    batch = make_targets()
    expected = make(untied, backend=ORACLE)
    assert not bool(values_of(expected, batch).any())
    metrics = [expected.update(batch, LOSS) for _ in range(3)]
    for layout in ({}, {"packing": True}, {"tokens_per_microbatch": 20}):
        found = make(untied, **layout)
        for wanted in metrics:
            assert_same(found.update(batch, LOSS), wanted, "microbatches")
        torch.testing.assert_close(
            values_of(found, batch), values_of(expected, batch), atol=2e-5, rtol=0
        )
        ours, theirs = dict(found.critic.weights()), dict(expected.critic.weights())
        assert set(ours) == set(theirs) and "lm_head.weight" not in ours
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, atol=1e-4, rtol=1e-4)


def test_a_value_is_of_what_stands_before_the_token(make: Any) -> None:
    trainer, batch = make(backend=ORACLE), make_targets()
    for _ in range(2):
        trainer.update(batch, LOSS)
    before = values_of(trainer, batch)
    tokens = batch.tokens.clone()
    tokens[0, 9] = tokens[0, 9] % (VOCAB - 1) + 1
    changed = values_of(trainer, batch.replace(tokens=tokens))
    assert torch.equal(changed[0, :10], before[0, :10]) and not bool(
        (changed[0, 10:] == before[0, 10:]).all()
    )
    longer = values_of(trainer, lengthened(batch))
    torch.testing.assert_close(longer[:, :-1][batch.loss_mask], before[batch.loss_mask])
    assert longer[0, batch.lengths[0]] != 0  # the value after the last token


def test_the_policy_learns_what_it_learns_without_a_critic(make: Any) -> None:
    batch = make_targets()
    with_critic, alone = make(), make(critic=None)
    for _ in range(2):
        assert_same(with_critic.update(batch, LOSS), alone.update(batch, PPOClipLoss()))
    assert digest(with_critic.weights()) == digest(alone.weights())
    with_critic.snapshot("reference")
    assert set(with_critic.score(batch, "reference")) == {"logprobs"}


def test_warm_up_is_the_critics_alone(make: Any) -> None:
    batch = make_targets()
    trainer = make(critic={"lr": 1e-2, "warmup_updates": 2})
    start, values = digest(trainer.weights()), values_of(trainer, batch)
    for number in range(3):
        metrics = trainer.update(batch, LOSS)
        assert (metrics["lr"] == 0) == ("policy_loss" not in metrics) == (number < 2)
        assert (digest(trainer.weights()) == start) == (number < 2)
    assert not torch.equal(values_of(trainer, batch), values)
    patient = make(
        critic={"warmup_updates": 2}
    )  # waits for its critic, not for a loss that has no part for it
    assert patient.update(batch, PPOClipLoss())["lr"] > 0 and digest(patient.weights()) != start


def test_each_model_has_its_own_schedule_norm_and_clipping(make: Any) -> None:
    """The gradient of a far return is clipped; the policy's is not touched by it."""
    schedule = {"name": "linear", "decay_steps": 4}
    trainer = make(backend=ORACLE, critic={"lr": 1e-2, "schedule": schedule}, max_gradient_norm=1.0)
    batch = make_targets()
    far = batch.replace(returns=1000 * batch.returns)
    alone = make(backend=ORACLE, critic=None, max_gradient_norm=1.0)
    for rate in (0.01, 0.0075, 0.005):
        metrics = trainer.update(far, LOSS)
        assert metrics["critic_lr"] == pytest.approx(rate) and metrics["lr"] == 1e-3
        assert metrics["critic_gradient_norm"] > 100
        assert metrics["gradient_norm"] == alone.update(batch, PPOClipLoss())["gradient_norm"]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "megatron"},
        {
            "dtype": "bfloat16",
            "distributed_optimizer": True,
            "release_gradients": True,
            "packing": True,
        },
        {"backend": ORACLE},
    ],
)
def test_a_checkpoint_holds_the_critic_and_its_warm_up(
    make: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    batch, options = make_targets(), {**options, "critic": {"lr": 1e-2, "warmup_updates": 3}}
    trainer, resumed = make(**options), make(**options)
    for _ in range(2):
        trainer.update(batch, LOSS)
    trainer.begin_save(tmp_path / "checkpoint", 7)
    assert trainer.finish_save()
    assert resumed.load(tmp_path / "checkpoint") == 7
    for _ in range(2):  # one of the critic's alone, one of both
        assert trainer.update(batch, LOSS) == resumed.update(batch, LOSS)
    assert digest(resumed.weights()) == digest(trainer.weights())
    assert torch.equal(values_of(resumed, batch), values_of(trainer, batch))


def test_a_checkpoint_without_a_critic_is_refused_and_one_with_it_loads_without(
    make: Any, tmp_path: Path
) -> None:
    plain, trainer = make(backend=ORACLE, critic=None), make(backend=ORACLE)
    plain.save(tmp_path / "plain", 1)
    trainer.save(tmp_path / "both", 2)
    with pytest.raises(
        CheckpointError, match=r"expected a critic in it, found none.*algorithm\.critic"
    ):
        trainer.load(tmp_path / "plain")
    assert plain.load(tmp_path / "both") == 2


def test_no_critic_is_one_clear_error(make: Any) -> None:
    batch = make_targets()
    for backend in ("megatron", ORACLE):
        trainer = make(backend=backend, critic=None)
        with pytest.raises(
            ConfigError, match=r"values come from a critic, found none; set algorithm\.critic"
        ):
            values_of(trainer, batch)
        with pytest.raises(
            RLFlowError, match=r"loss value: the trainer gave no values; set algorithm\.critic"
        ):
            trainer.update(batch, ValueLoss())


def test_options_of_the_critic_are_checked(model: Path) -> None:
    for critic, message in (
        ({"lr": 0}, r"algorithm\.critic\.lr: expected a number above 0, found 0"),
        ({"learning_rate": 1}, r"algorithm\.critic: unknown keyword 'learning_rate'"),
        ({"schedule": "cosin"}, r"unknown name 'cosin'\. Did you mean 'cosine'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer.from_pretrained(model, ORACLE, critic=critic)


def test_a_loss_in_log_probs_finds_none_at_the_critic(make: Any) -> None:
    class Mixed(ValueLoss):
        def __call__(self, output: Any, batch: Batch) -> Any:
            loss, metrics = super().__call__(output, batch)
            return loss + output.logprobs, metrics

    trainer = make(backend=ORACLE)
    assert isinstance(trainer, ActorCritic)
    with pytest.raises(RLFlowError, match="the loss is nan"):
        trainer.update(make_targets(), Mixed())
