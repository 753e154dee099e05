"""Tokens go to the experts that the batch names: against transformers whose routers are overruled, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.batching import ROUTED, ROUTES, make_batch
from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.trainer.megatron import router_replay
from rlflow.types import Batch, Segment, StopReason, Trajectory
from tests.unit.trainer import batches
from tests.unit.trainer.batches import VOCAB, policy_gradient

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=False, **SIZES)


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "router_replay": "rollout", "max_gradient_norm": 0.0}


def routed(batch: Batch, seed: int = 0) -> Batch:
    """With random experts, two of four, in both layers that have some; the last token of a row has none."""
    order = torch.rand(
        *batch.tokens.shape, 2, 4, generator=torch.Generator().manual_seed(seed)
    ).argsort(-1)
    return batch.replace(extras={ROUTES: order[..., :2].to(torch.uint8), ROUTED: batch.lengths - 1})


def chosen(path: Path, batch: Batch) -> torch.Tensor:
    """(B, T, layers with experts, k) of transformers, in the order of the experts."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = oracle(batch.tokens, output_router_logits=True).router_logits
    found = torch.stack([layer.topk(2).indices.sort().values for layer in logits], 1)
    return found.unflatten(0, batch.tokens.shape)


def save_weights(weights: Any, model: Path, path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(
        {name: weight.clone() for name, weight in weights},
        path / "model.safetensors",
        {"format": "pt"},
    )


def overruled(path: Path, batch: Batch, aux: float = 0.0) -> tuple[float, float]:
    """Loss and gradient norm of transformers, whose routers weigh the named experts by their own scores. aux: times their
    scores by the share of the tokens with routes that go to each, which is added to the loss."""
    from transformers import AutoModelForCausalLM

    known = (torch.arange(batch.tokens.shape[1]) < batch.extras[ROUTED][:, None]).flatten()
    balance: list[torch.Tensor] = []
    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    for place, layer in enumerate((0, 2)):
        named = batch.extras[ROUTES][:, :, place].flatten(0, 1).long()

        def overrule(_: Any, __: Any, answer: Any, named: torch.Tensor = named) -> Any:
            free = answer[0].softmax(-1)
            load = torch.nn.functional.one_hot(named[known], 4).float().sum(1).mean(0)
            balance.append(4 * (load * free[known].mean(0)).sum())
            scores = free.gather(1, named)
            return answer[0], scores / scores.sum(-1, keepdim=True), named

        oracle.model.layers[layer].mlp.gate.register_forward_hook(overrule)
    logits = oracle(batch.tokens).logits[:, :-1] / 0.8
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    loss = -(batch.weights * batch.advantages)[:, 1:].mul(logprobs).sum()
    (loss + aux * torch.stack(balance).mean()).backward()
    norms = [
        parameter.grad.norm() for parameter in oracle.parameters() if parameter.grad is not None
    ]
    return loss.item(), torch.stack(norms).norm().item()


AUX = {"balance": {"aux_loss": 0.3}}


@pytest.mark.parametrize(
    "options",
    [{"recompute": "selective"}, {"packing": True, "recompute": "full"}, {"packing": True, **AUX}],
    ids=str,
)
def test_named_experts_are_taken_as_in_transformers(
    make: Any, model: Path, options: dict[str, Any]
) -> None:
    batch = routed(batches.make_batch())
    trainer = make(tokens_per_microbatch=50, **options)
    free = trainer.score(batches.make_batch())["logprobs"]
    assert not torch.allclose(trainer.score(batch)["logprobs"], free, atol=1e-3)
    metrics = trainer.update(batch, policy_gradient)
    assert metrics["microbatches"] > 1
    loss, norm = overruled(model, batch, aux=0.3 if "balance" in options else 0.0)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "recompute": "full"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=str,
)
def test_recorded_experts_are_those_of_transformers_and_replayed_after_the_weights_changed(
    make: Any, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make(
        tokens_per_microbatch=50, **{**options, "router_replay": "recompute", "lr": 0.05}
    )
    batch = batches.make_batch()
    scores = trainer.score(batch, want=("logprobs", ROUTES))
    assert torch.equal(scores["logprobs"], trainer.score(batch)["logprobs"])
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    expected = chosen(model, batch)
    assert torch.equal(scores[ROUTES].sort(-1).values[real].long(), expected[real])
    batch = batch.replace(extras={ROUTES: scores[ROUTES], ROUTED: batch.lengths})
    trainer.update(batch, policy_gradient)
    save_weights(trainer.weights(), model, tmp_path / "changed")
    assert not torch.equal(chosen(tmp_path / "changed", batch)[real], expected[real]), (
        "the step changed no route"
    )
    metrics = trainer.update(batch, policy_gradient)
    loss, norm = overruled(tmp_path / "changed", batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_without_recorded_experts_an_update_is_refused(make: Any) -> None:
    with pytest.raises(DataError, match=r"found none; .* trainer\.score \(recompute\)"):
        make(router_replay="recompute").update(batches.make_batch(), policy_gradient)


def test_a_backward_pass_that_takes_the_routes_of_some_microbatches_is_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = router_replay.Replaying.finish

    def lose(self: Any, chunks: Any, microbatches: int) -> None:
        next(router_replay._routers(chunks[0]))[1].replay_backward_list.pop()
        finish(self, chunks, microbatches)

    monkeypatch.setattr(router_replay.Replaying, "finish", lose)
    with pytest.raises(RLFlowError, match=r"of 3 micro-batches the routes of \[2, 3\] were left"):
        make(tokens_per_microbatch=50).update(routed(batches.make_batch()), policy_gradient)


def test_a_dense_model_has_no_routes_to_score(make: Any, tmp_path: Path) -> None:
    dense = tiny_model(tmp_path, "qwen2", tokenizer=False, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="the model has no experts, and so no routes"):
        make(dense, router_replay="off").score(batches.make_batch(), want=("logprobs", ROUTES))


def test_a_loss_that_fails_leaves_no_routes_behind(make: Any) -> None:
    """The next update found more of them than it has micro-batches."""
    trainer, batch = make(), routed(batches.make_batch())
    with pytest.raises(RLFlowError, match="a loss and its metrics are"):
        trainer.update(batch, lambda output, batch: (output.logprobs.sum(), {}))
    assert trainer.update(batch, policy_gradient)["gradient_norm"] > 0


def test_afterwards_routers_choose_again(make: Any) -> None:
    trainer, batch = make(), batches.make_batch()
    before = trainer.score(batch)["logprobs"]
    trainer.score(routed(batch))
    assert torch.equal(trainer.score(batch)["logprobs"], before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda extras: {}, "found none; sample with an engine that says them"),
        (
            lambda extras: {**extras, ROUTED: extras[ROUTED] - 1},
            r"row 0: expected routes of 19 tokens, .* found 18",
        ),
        (lambda extras: {**extras, ROUTES: extras[ROUTES][..., :1]}, r"\(2, 2\), found \(2, 1\)"),
        (lambda extras: {**extras, ROUTES: extras[ROUTES] + 1}, "expected routes of 0 to 3"),
    ],
)
def test_routes_that_are_missing_short_or_of_another_model_are_refused(
    make: Any, change: Any, words: str
) -> None:
    batch = routed(batches.make_batch())
    changed = change(batch.extras)
    batch.extras.clear()
    with pytest.raises(DataError, match=words):
        make().update(batch.replace(extras=changed), policy_gradient)


def test_a_model_without_experts_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: the model has no experts"):
        make(tiny_model(tmp_path, "qwen2", tokenizer=False, vocab_size=VOCAB))


def test_a_batch_has_the_routes_of_its_segments() -> None:
    def trajectory(length: int, routes: torch.Tensor | None) -> Trajectory:
        tokens = torch.arange(length)
        segment = Segment(tokens, tokens > 0, torch.zeros(length), torch.zeros_like(tokens), routes)
        return Trajectory("t", "g", [segment], [], 0.0, StopReason.TERMINATED)

    routes = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    batch = make_batch([trajectory(4, routes), trajectory(6, None)])
    assert batch.extras[ROUTES].shape == (2, 6, 2, 2)
    assert torch.equal(batch.extras[ROUTES][0, :3], routes)
    assert batch.extras[ROUTED].tolist() == [3, 0]
    assert ROUTES not in make_batch([trajectory(6, None)]).extras
