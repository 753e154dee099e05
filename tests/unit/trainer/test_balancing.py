"""An even load of experts: losses against transformers in double precision, biases against counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.algorithms import PPOClipLoss
from rlflow.batching import ROUTES
from rlflow.errors import ConfigError
from rlflow.models.huggingface import digest, iterate_weights
from tests.reference import ORACLE
from tests.unit.trainer.batches import make_batch, policy_gradient
from tests.unit.trainer.test_experts import SIZES, gradients

BOTH = {"aux_loss": 0.3, "z_loss": 0.02}
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=False, **SIZES)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("biased"), "glm4_moe", tokenizer=False, num_hidden_layers=3, **SIZES
    )


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "max_gradient_norm": 0.0, "tokens_per_microbatch": 50}


def expected(path: Path, out: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Both losses and all gradients of transformers in double precision: each layer by itself, padding masked."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    layers: list[Tensor] = []
    for layer in oracle.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, answer: layers.append(answer[0]))
    batch = make_batch()
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    logits = oracle(batch.tokens).logits[:, :-1] / 0.8
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    loss = -(batch.weights * batch.advantages)[:, 1:].mul(logprobs).sum()
    aux = torch.stack(
        [load_balancing_loss_func((layer,), 4, 2, real.long()) for layer in layers]
    ).mean()
    z = torch.stack(
        [layer.logsumexp(-1).square()[real.flatten()].mean() for layer in layers]
    ).mean()
    (loss + BOTH["aux_loss"] * aux + BOTH["z_loss"] * z).backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.grad)
    oracle.save_pretrained(str(out))
    return {"loss": loss.item(), "router_aux_loss": aux.item(), "router_z_loss": z.item()}, dict(
        iterate_weights(out)
    )


@pytest.fixture(scope="module")
def oracle(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, float], dict[str, Tensor]]:
    return expected(model, tmp_path_factory.mktemp("oracle"))


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_microbatch": 1000},
        {},
        {"packing": True, "recompute": "full"},
        {"recompute": "selective"},
    ],
    ids=str,
)
def test_losses_and_gradients_equal_transformers_however_rows_are_split(
    make: Any, oracle: Any, options: Any
) -> None:
    losses, wanted = oracle
    trainer = make(balance=BOTH, **options)
    metrics = trainer.update(make_batch(), policy_gradient)
    assert (metrics["microbatches"] == 1) == ("tokens_per_microbatch" in options)
    assert {name: metrics[name] for name in losses} == pytest.approx(losses, rel=1e-6)
    found = gradients(trainer)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def biases(weights: Any) -> Tensor:
    """(layers with experts, experts)."""
    return torch.stack([weight for name, weight in weights if name.endswith(BIAS)])


@pytest.mark.parametrize(
    "balance", [{"bias_rate": 0.01}, {"bias_rate": 0.01, "aux_loss": 0.1}], ids=str
)
def test_biases_move_by_the_load_of_an_update_and_a_snapshot_keeps_its_own(
    make: Any, biased: Path, balance: Any
) -> None:
    trainer, batch = make(biased, balance=balance, recompute="selective"), make_batch()
    trainer.snapshot("reference")
    before, reference = (
        biases(iterate_weights(biased)),
        trainer.score(batch, "reference")["logprobs"],
    )
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    routes = trainer.score(batch, want=(ROUTES,))[ROUTES][real].long()
    counts = torch.nn.functional.one_hot(routes, 4).sum((0, 2)).double()
    assert trainer.update(batch, policy_gradient)["microbatches"] > 1
    moved = before + 0.01 * (counts.mean(1, keepdim=True) - counts).sign().float()
    assert torch.equal(biases(trainer.weights()), moved) and not torch.equal(moved, before)
    for chunk in trainer._chunks:  # the weights of the start, and biases far from them
        for name, value in chunk.named_buffers():
            value += 10 * torch.arange(4) * name.endswith("expert_bias")
    torch.testing.assert_close(
        trainer.score(batch, "reference")["logprobs"], reference, atol=0, rtol=0
    )


def test_biases_stay_where_an_update_moves_no_weight(make: Any, biased: Path) -> None:
    trainer, batch = make(biased, balance={"bias_rate": 0.01}), make_batch()
    before = digest(trainer.weights())
    assert trainer.update(batch.replace(advantages=0 * batch.advantages), policy_gradient)[
        "updates_skipped"
    ]
    assert digest(trainer.weights()) == before


@pytest.mark.parametrize("nothing", ["advantages", "weights", "coefficients"])
def test_router_losses_alone_move_no_weight(make: Any, nothing: str) -> None:
    """An update whose policy term vanishes is skipped, with losses of the routers as without; one
    with any advantage has them."""
    trainer, batch = make(balance=BOTH), make_batch()
    batch = batch.replace(trainer_version=batch.lengths)  # a training step may mask everything
    before = digest(trainer.weights())
    idle = batch.replace(**{nothing: torch.zeros(batch.tokens.shape)})
    assert trainer.update(idle, PPOClipLoss())["updates_skipped"] == 1
    assert digest(trainer.weights()) == before
    moving = trainer.update(batch, PPOClipLoss())
    assert moving["router_aux_loss"] > 1 and "updates_skipped" not in moving


def test_a_loss_that_learns_without_advantages_keeps_the_router_losses(make: Any) -> None:
    batch = make_batch()
    metrics = make(balance=BOTH).update(
        batch.replace(advantages=0 * batch.advantages), policy_gradient
    )
    assert metrics["router_aux_loss"] > 1 and metrics["gradient_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.01, 0.0])
def test_a_checkpoint_keeps_moved_biases_of_policy_and_snapshots(
    make: Any, biased: Path, rate: float, tmp_path: Path
) -> None:
    """Also where what is continued moves no biases, and then the other way."""
    moving, batch = make(biased, balance={"bias_rate": 0.01}), make_batch()
    moving.update(batch, policy_gradient)
    moving.snapshot("reference")
    moving.update(batch, policy_gradient)
    moving.save(tmp_path / "first", 2)
    other = make(biased, balance={"bias_rate": rate})
    assert other.load(tmp_path / "first") == 2
    other.save(tmp_path / "second", 2)
    last = make(biased, balance={"bias_rate": 0.01})
    last.load(tmp_path / "second")
    assert digest(last.weights()) == digest(moving.weights())
    expected = moving.score(batch, "reference")["logprobs"]
    assert torch.equal(last.score(batch, "reference")["logprobs"], expected)
    assert last.update(batch, policy_gradient) == moving.update(batch, policy_gradient)
    assert digest(last.weights()) == digest(moving.weights())


@pytest.mark.slow
def test_a_snapshot_without_biases_gets_those_that_had_not_moved(
    make: Any, biased: Path, tmp_path: Path
) -> None:
    still, batch = make(biased), make_batch()
    still.snapshot("reference")
    still.save(tmp_path / "still", 0)
    moving = make(biased, balance={"bias_rate": 1.0})
    moving.load(tmp_path / "still")
    moving.update(batch, policy_gradient)
    expected = still.score(batch, "reference")["logprobs"]
    assert torch.equal(moving.score(batch, "reference")["logprobs"], expected)


@pytest.mark.parametrize(
    ("said", "balance", "found"),
    [
        ({"output_router_logits": True}, None, True),
        ({"output_router_logits": True}, {"z_loss": 0.02}, False),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None, False),
        ({}, None, False),
    ],
    ids=str,
)
def test_the_model_s_loss_counts_where_transformers_would_add_it(
    make: Any, model: Path, oracle: Any, said: Any, balance: Any, found: bool, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"router_aux_loss_coef": 0.3} | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    metrics = make(tmp_path, balance=balance).update(make_batch(), policy_gradient)
    assert ("router_aux_loss" in metrics, "router_z_loss" in metrics) == (
        found,
        balance is not None,
    )
    if found:
        plain = make(balance={"aux_loss": 0.3}).update(make_batch(), policy_gradient)
        assert metrics == plain and metrics["router_aux_loss"] == pytest.approx(
            oracle[0]["router_aux_loss"]
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"balance": {"bias_rate": 0.1}}, "routers of model family 'qwen3_moe' have no bias"),
        ({"balance": {"aux": 0.1}}, r"trainer\.balance: unknown keyword 'aux'"),
        (
            {"balance": {"aux_loss": 0.1}, "backend": ORACLE},
            "'reference' adds no loss of the load of experts",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_balanced_is_refused(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**options)


def test_biases_beside_adapters_and_dense_models_are_refused(
    make: Any, biased: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"with trainer\.lora the routers stay as they are"):
        make(biased, balance={"bias_rate": 0.1}, lora={"rank": 2, "targets": ["q_proj"]})
    dense = tiny_model(tmp_path, "qwen2", tokenizer=False, **SIZES)
    with pytest.raises(ConfigError, match=r"trainer\.balance: the model has no experts"):
        make(dense, balance={"aux_loss": 0.1})


def test_a_critic_is_another_model(make: Any) -> None:
    metrics = make(balance=BOTH, values=True).update(
        make_batch(), lambda output, batch: (output.values, {})
    )
    assert "router_aux_loss" not in metrics
