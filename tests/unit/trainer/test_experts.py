"""Mixtures of experts in one process: against transformers, and against themselves. Over ranks: tests/dist/test_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.batching import ROUTED, ROUTES
from rlflow.errors import ConfigError
from rlflow.models.huggingface import digest, iterate_weights
from tests.reference import ORACLE
from tests.unit.trainer.batches import VOCAB, make_batch, policy_gradient
from tests.unit.trainer.gradients import assert_gradients_equal_transformers, gradients

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
MIXED = {"num_hidden_layers": 4, "decoder_sparse_step": 2}  # layers 0 and 2 are dense
# More than get a token
MANY = {"num_experts": 32, "num_experts_per_tok": 1, "norm_topk_prob": False, "tied": True}
GROUPS = {"n_routed_experts": 8, "n_group": 4}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.9,
}  # fmt: skip
ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=False, **SIZES)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", MIXED),
        ("qwen3_moe", MANY),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("glm4_moe", GROUPS),
        ("deepseek_v2", {"rope_parameters": YARN}),
        ("deepseek_v3", {}),
        *(
            pytest.param(family, sizes, marks=pytest.mark.slow)
            for family, sizes in (
                ("qwen3_moe", {}),
                ("qwen3_moe", {"norm_topk_prob": False, "tied": True}),
                ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
                ("deepseek_v2", {}),
                ("deepseek_v2", {"rope_parameters": YARN, "q_lora_rank": 24}),
            )
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_transformers(
    make: Any, family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "model", family, tokenizer=False, **{**SIZES, **sizes})
    found = assert_gradients_equal_transformers(make, path, tmp_path / "gradients")
    routers = [
        gradient
        for name, gradient in found.items()
        if name.endswith(("mlp.gate.weight", "moe.gate.weight"))
    ]
    assert routers and all(gradient.any() for gradient in routers)
    if sizes is MANY:
        assert any(not gradient.any() for name, gradient in found.items() if ".experts." in name), (
            "all had tokens"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True, "recompute": "full"},
        {"recompute": "selective", "distributed_optimizer": True},
    ],
    ids=str,
)
def test_packing_recomputation_and_a_split_optimizer_change_nothing(
    make: Any, options: dict[str, Any]
) -> None:
    adamw = {
        "name": "adamw",
        "eps": 1e-5,
    }  # a smaller one makes rounding of gradients near 0 a step
    plain, other = make(optimizer=adamw), make(optimizer=adamw, **options)
    for _ in range(2):
        expected, found = (
            trainer.update(make_batch(), policy_gradient) for trainer in (plain, other)
        )
    assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)
    weights = dict(plain.weights())
    for name, weight in other.weights():
        assert (weight - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("deepseek_v3", True),
        *(
            pytest.param(family, split, marks=pytest.mark.slow)
            for family in ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
            for split in (False, True)
            if (family, split) != ("deepseek_v3", True)
        ),
    ],
)
def test_a_checkpoint_continues_bit_for_bit(
    make: Any, family: str, split: bool, tmp_path: Path
) -> None:
    """Latent attention, shared experts, and where there are biases, moving ones. Another split: within 1e-6."""
    path = tiny_model(tmp_path / "model", family, tokenizer=False, **SIZES)
    moving = {"aux_loss": 0.1, "bias_rate": 0.01 if family in ("glm4_moe", "deepseek_v3") else 0.0}

    def build(distributed: bool) -> Any:
        return make(path, distributed_optimizer=distributed, balance=moving)

    trainer = build(split)
    trainer.update(make_batch(), policy_gradient)
    trainer.snapshot("reference")
    trainer.save(tmp_path / "checkpoint", 1)
    metrics = trainer.update(make_batch(seed=1), policy_gradient)
    same, other = build(split), build(not split)
    assert same.load(tmp_path / "checkpoint") == other.load(tmp_path / "checkpoint") == 1
    assert same.update(make_batch(seed=1), policy_gradient) == metrics
    assert digest(same.weights()) == digest(trainer.weights())
    references = [
        one.score(make_batch(), "reference")["logprobs"] for one in (trainer, same, other)
    ]
    assert torch.equal(references[0], references[1]) and torch.equal(references[0], references[2])
    assert other.update(make_batch(seed=1), policy_gradient) == pytest.approx(metrics, rel=1e-5)
    weights = dict(trainer.weights())
    for name, weight in other.weights():
        assert (weight - weights[name]).norm() <= 1e-6 * weights[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"]
)
def test_bfloat16_is_as_exact_as_transformers_and_keeps_biases_whole(
    make: Any, family: str, tmp_path: Path
) -> None:
    """Root mean square of log-probs against float32, on the routes of float32; the gradient norm within 3%."""
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "model", family, tokenizer=False, **SIZES)
    exact, batch = make(path, router_replay="rollout", max_gradient_norm=0.0), make_batch()
    batch = batch.replace(
        extras={ROUTES: exact.score(batch, want=(ROUTES,))[ROUTES], ROUTED: batch.lengths}
    )
    balance = {"bias_rate": 0.001} if family in ("glm4_moe", "deepseek_v3") else None
    rounded = make(
        path, router_replay="rollout", max_gradient_norm=0.0, dtype="bfloat16", balance=balance
    )
    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = oracle(batch.tokens).logits[:, :-1].float() / 0.8
    theirs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    expected, found = (
        one.score(batch)["logprobs"][:, 1:][batch.trained[:, 1:]] for one in (exact, rounded)
    )
    error, other = (found - expected).norm(), (theirs[batch.trained[:, 1:]] - expected).norm()
    assert 0 < error <= 1.25 * other
    norms = [one.update(batch, policy_gradient)["gradient_norm"] for one in (exact, rounded)]
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    start = dict(iterate_weights(path))
    for name, weight in rounded.weights():
        if name.endswith("correction_bias"):
            assert weight.dtype is torch.float32
            assert ((weight - start[name]).abs() <= 0.001 + 1e-7).all() and not torch.equal(
                weight, start[name]
            )


def test_clipping_counts_the_experts(make: Any) -> None:
    """Clipped, the gradients of all parameters together are as long as allowed."""
    trainer = make(max_gradient_norm=1e-3)
    norm = trainer.update(make_batch(), policy_gradient)["gradient_norm"]
    clipped = torch.stack([gradient.norm() for gradient in gradients(trainer).values()]).norm()
    assert norm > 1e-2
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_the_reference_trainer_names_experts_as_files_do(
    make: Any, family: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family, tokenizer=False, **SIZES)
    assert digest(make(path, backend=ORACLE).weights()) == digest(iterate_weights(path))


def test_experts_get_no_adapters(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.lora\.targets: experts get no adapters; .*gate_proj"
    ):
        make(lora={"rank": 2})


def test_adapters_of_attention_leave_experts_alone(make: Any, model: Path) -> None:
    trainer = make(lora={"rank": 2, "targets": ATTENTION})
    assert trainer.update(make_batch(), policy_gradient)["gradient_norm"] > 0
    before = dict(iterate_weights(model))
    changed = {name for name, weight in trainer.weights() if not torch.equal(weight, before[name])}
    assert changed and all(name.split(".")[-2] in ATTENTION for name in changed)


def test_another_model_beside_one_with_experts_may_be_dense(make: Any, tmp_path: Path) -> None:
    dense = tiny_model(tmp_path, "qwen2", tokenizer=False, **SIZES)
    trainer, batch = make(), make_batch()
    trainer.load_frozen("teacher", dense)
    expected = make(dense).score(batch)["logprobs"]
    torch.testing.assert_close(
        trainer.score(batch, "teacher")["logprobs"], expected, atol=1e-6, rtol=0
    )
