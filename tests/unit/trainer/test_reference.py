"""The reference trainer against transformers and torch directly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import EntropyLoss, KLLoss, PPOClipLoss, SFTLoss, SumLoss, token_weights
from rlflow.batching import make_batch, rows_with_advantage
from rlflow.errors import CheckpointError, ConfigError, ModelError, RLFlowError
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Loss, LossResult, PolicyOutput, Segment, StopReason, Trajectory
from tests import rounding
from tests.fixtures import tiny_model
from tests.reference import ORACLE
from tests.reference.trainer import ReferenceTrainer

PLAIN = {"name": "adamw", "eps": 1.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0}
"""eps 1 and no averages: a step nearly proportional to the gradient."""

LENGTHS = (7, 12, 3, 9)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=48, tokenizer=False
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    owners = []
    for index, length in enumerate(LENGTHS):
        tokens = torch.randint(0, 384, (length,), generator=generator)
        mask = torch.arange(length) >= 2
        segment = Segment(
            tokens, mask, -torch.rand(length, generator=generator), torch.where(mask, 0, -1)
        )
        owners.append(
            Trajectory(
                "t", "g", [segment], [], 1.0, StopReason.TERMINATED, temperature=0.5 + 0.25 * index
            )
        )
    whole = make_batch(owners)
    advantages = torch.randn(len(owners), 1, generator=generator).expand(whole.tokens.shape)
    return whole.replace(weights=token_weights(whole), advantages=advantages)


def test_the_padding_token_learns_where_it_was_sampled(model_path):
    """transformers gives the embedding of config.pad_token_id (0 here) no gradient; the probability of what follows it depends
    on that embedding all the same."""
    tokens = torch.tensor([5, 0, 9])
    segment = Segment(
        tokens, torch.tensor([False, False, True]), torch.zeros(3), torch.full((3,), -1)
    )
    batch = make_batch([Trajectory("t", "g", [segment], [], 1.0, StopReason.TERMINATED)])
    batch = batch.replace(weights=token_weights(batch))
    changed = {}
    for backend in (ORACLE, "megatron"):
        trainer = Trainer.from_pretrained(model_path, backend, lr=1.0, optimizer=PLAIN)
        before = dict(huggingface(model_path).named_parameters())[
            "model.embed_tokens.weight"
        ].detach()
        trainer.update(batch, SFTLoss())
        changed[backend] = dict(trainer.weights())["model.embed_tokens.weight"] - before
        trainer.close()
    assert float(changed[ORACLE][0].norm()) > 1e-3
    assert torch.allclose(changed[ORACLE], changed["megatron"], atol=1e-6)


def huggingface(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()


def trained(
    path: Path, batch: Batch, updates: int = 3, loss=None, **options
) -> tuple[ReferenceTrainer, list[dict]]:
    trainer = ReferenceTrainer(path, **{"lr": 1e-2, **options})
    return trainer, [trainer.update(batch, loss or SFTLoss()) for _ in range(updates)]


def assert_up_to_rounding(
    path: Path, batch: Batch, loss, updates: int, one: Trainer, other: Trainer, **options
) -> None:
    """The weights of two trainers of the model after these updates differ by no more than rounding explains."""
    exact = rounding.Updates(lambda: ReferenceTrainer(path, **options), batch, loss, updates)
    for (name, ours), (_, theirs) in zip(one.weights(), other.weights(), strict=True):
        assert ((ours - theirs).abs() <= exact.most_apart(name, ours)).all(), name


def equal(one: Trainer, other: Trainer) -> bool:
    return all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one.weights(), other.weights(), strict=True)
    )


@torch.no_grad()
def test_scores_are_transformers_log_probs_and_entropies_row_by_row(model_path, batch):
    scores = ReferenceTrainer(model_path).score(batch, want=("logprobs", "entropy"))
    model = huggingface(model_path)
    for row, length in enumerate(LENGTHS):
        tokens = batch.tokens[row : row + 1, :length]
        distribution = torch.distributions.Categorical(
            logits=model(tokens).logits[0, :-1] / batch.temperatures[row]
        )
        expected = torch.zeros(batch.tokens.shape[1])
        expected[1:length] = distribution.log_prob(tokens[0, 1:])
        torch.testing.assert_close(scores["logprobs"][row], expected, atol=1e-5, rtol=0)
        expected[1:length] = distribution.entropy()
        torch.testing.assert_close(scores["entropy"][row], expected, atol=1e-5, rtol=0)


def test_a_greedy_row_is_scored_at_temperature_one(model_path, batch):
    trainer = ReferenceTrainer(model_path)
    greedy = trainer.score(batch.replace(temperatures=torch.zeros(len(batch))))["logprobs"]
    assert torch.equal(
        greedy, trainer.score(batch.replace(temperatures=torch.ones(len(batch))))["logprobs"]
    )


def test_supervised_updates_are_transformers_loss_and_torchs_adamw(model_path, batch):
    warm = batch.replace(temperatures=torch.ones(len(batch)))
    adamw = {"name": "adamw", "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    options = {"max_gradient_norm": 0.5, "optimizer": adamw}
    trainer, reports = trained(model_path, warm, **options)

    model = huggingface(model_path)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    labels = torch.where(warm.loss_mask, warm.tokens, -100)
    for report in reports:
        optimizer.zero_grad()
        loss = model(input_ids=warm.tokens, labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert report["loss"] == pytest.approx(loss.item(), rel=1e-5) == report["nll"]
        assert report["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    exact = rounding.Updates(
        lambda: ReferenceTrainer(model_path, lr=1e-2, **options), warm, SFTLoss(), len(reports)
    )
    for name, value in trainer.weights():
        assert ((value - model.get_parameter(name)).abs() <= exact.most_apart(name, value)).all(), (
            name
        )


def test_updates_are_invariant_to_micro_batches_and_padding(model_path, batch):
    loss = SumLoss((PPOClipLoss(), EntropyLoss(0.01)))
    adamw = {
        "name": "adamw",
        "eps": 1e-3,
    }  # a small eps would make Adam's first step the sign of rounding
    options = {"updates": 1, "loss": loss, "optimizer": adamw}
    whole, [report] = trained(model_path, batch, **options)
    assert report["microbatches"] == 1 and report["tokens"] == sum(LENGTHS)
    wide = make_wider(batch, 30)
    for tokens_per_microbatch, data in ((1, batch), (20, batch), (16384, wide)):
        other, [again] = trained(
            model_path, data, tokens_per_microbatch=tokens_per_microbatch, **options
        )
        for name in set(report) - {"microbatches"}:
            assert again[name] == pytest.approx(report[name], rel=1e-5, abs=1e-7), name
        assert_up_to_rounding(model_path, batch, loss, 1, whole, other, lr=1e-2, optimizer=adamw)


class Reduced(Loss):
    """A loss whose metrics are a mean, a maximum and a count."""

    reductions = {"largest": "max", "count": "sum"}

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        size = output.logprobs.detach().abs()
        return -output.logprobs, {"size": size, "largest": size, "count": torch.ones_like(size)}


@pytest.mark.parametrize("tokens_per_microbatch", [8, 4096])
def test_metrics_are_means_maxima_or_counts_whatever_the_micro_batches(
    model_path, batch, tokens_per_microbatch
):
    """Against arithmetic over the whole batch; a token without weight counts in none of them."""
    trainer = ReferenceTrainer(model_path, tokens_per_microbatch=tokens_per_microbatch)
    weights = batch.weights * (
        torch.arange(batch.weights.numel()).view(batch.weights.shape) % 3 > 0
    )
    part = batch.replace(weights=weights)
    size, trained = trainer.score(part)["logprobs"].abs(), weights != 0
    report = trainer.update(part, Reduced())
    assert report["size"] == pytest.approx(float((weights * size).sum() / weights.sum()), rel=1e-5)
    assert report["largest"] == pytest.approx(float(size[trained].max()), rel=1e-5)
    assert report["count"] == int(trained.sum())


def make_wider(batch: Batch, width: int) -> Batch:
    def widen(value: Tensor) -> Tensor:
        return (
            torch.nn.functional.pad(value, (0, width - value.shape[1]))
            if value.dim() == 2
            else value
        )

    return batch.map(widen)


def test_a_snapshot_stays_while_the_policy_moves(model_path, batch):
    trainer = ReferenceTrainer(model_path, lr=1e-2)
    trainer.snapshot("reference")
    before = trainer.score(batch)["logprobs"]
    anchored = batch.replace(reference_logprobs=before)
    report = trainer.update(anchored, SumLoss((SFTLoss(), KLLoss(0.1))))
    assert report["kl"] == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(trainer.score(batch, model="reference")["logprobs"], before)
    assert not torch.allclose(trainer.score(batch)["logprobs"], before, atol=1e-3)


def test_leaving_out_rows_without_advantage_leaves_the_gradient_as_it_was(model_path, batch):
    advantages = batch.advantages.clone()
    advantages[[0, 2]] = 0.0
    whole = batch.replace(advantages=advantages)
    options = {"loss": PPOClipLoss(clip_high=0.3), "updates": 1, "lr": 1.0, "optimizer": PLAIN}
    one, [full] = trained(
        model_path, whole, **options
    )  # eps 1: a step proportional to the gradient
    other, [less] = trained(model_path, rows_with_advantage(whole), **options)
    assert (full["tokens"], less["tokens"]) == (sum(LENGTHS), LENGTHS[1] + LENGTHS[3])
    assert less["loss"] == pytest.approx(full["loss"], rel=1e-6)
    assert (
        less["gradient_norm"] == pytest.approx(full["gradient_norm"], rel=1e-6)
        and full["gradient_norm"] > 0
    )
    assert_up_to_rounding(
        model_path, whole, options.pop("loss"), options.pop("updates"), one, other, **options
    )


def test_without_any_advantage_one_row_makes_an_update_of_gradient_zero(model_path, batch):
    silent = rows_with_advantage(batch.replace(advantages=torch.zeros_like(batch.advantages)))
    assert silent.lengths.tolist() == [min(LENGTHS)]
    _, [metrics] = trained(model_path, silent, 1, PPOClipLoss())
    assert metrics["gradient_norm"] == 0.0


def test_the_rate_follows_the_schedule(model_path, batch):
    options = {"lr": 1e-2, "schedule": {"name": "linear", "warmup_steps": 2, "decay_steps": 4}}
    _, reports = trained(model_path, batch, updates=5, **options)
    assert [report["lr"] for report in reports] == pytest.approx([0.005, 0.01, 0.01, 0.005, 0.0])


def test_resuming_gives_the_bits_of_an_uninterrupted_run(model_path, batch, tmp_path):
    options = {"schedule": {"name": "cosine", "decay_steps": 9}}
    straight, _ = trained(model_path, batch, updates=2, **options)
    straight.snapshot("reference")
    straight.save(tmp_path / "checkpoint", step=17)
    expected = [straight.update(batch, PPOClipLoss()) for _ in range(2)]

    resumed = ReferenceTrainer(model_path, lr=1e-2, **options)
    assert resumed.load(tmp_path / "checkpoint") == 17
    assert [resumed.update(batch, PPOClipLoss()) for _ in range(2)] == expected
    assert equal(straight, resumed)
    frozen = [
        trainer.score(batch, model="reference")["logprobs"] for trainer in (straight, resumed)
    ]
    assert torch.equal(*frozen)


@pytest.mark.parametrize(
    "damage", ["missing", "truncated weights", "truncated optimizer", "other model"]
)
def test_a_wrong_checkpoint_is_a_checkpoint_error(model_path, batch, tmp_path, damage):
    trainer, _ = trained(model_path, batch, updates=1)
    path = tmp_path / "checkpoint"
    if damage != "missing":
        trainer.save(path, step=1)
    if damage.startswith("truncated"):
        file = path / ("policy.safetensors" if damage.endswith("weights") else "optimizer.pt")
        file.write_bytes(file.read_bytes()[:1000])
    if damage == "other model":
        other = tiny_model(tmp_path / "other", hidden_size=64, tokenizer=False)
        trainer = ReferenceTrainer(other)
    with pytest.raises(CheckpointError, match="checkpoint"):
        trainer.load(path)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_carry_the_names_of_the_huggingface_files(tmp_path, batch, tied):
    from safetensors.torch import load_file

    path = tiny_model(tmp_path, tied=tied, hidden_size=32, intermediate_size=48, tokenizer=False)
    trainer = ReferenceTrainer(path, lr=1e-2)
    stored, given = load_file(path / "model.safetensors"), dict(trainer.weights())
    assert set(given) == set(stored) and ("lm_head.weight" in given) != tied
    assert all(torch.equal(given[name], stored[name]) for name in stored)
    trainer.update(batch, SFTLoss())  # what was given out is a copy
    assert all(torch.equal(given[name], stored[name]) for name in stored)


def test_bfloat16_trains_on_float32_masters(model_path, batch):
    exact, _ = trained(model_path, batch, lr=1e-4)
    rounded, _ = trained(model_path, batch, lr=1e-4, dtype="bfloat16")
    assert {value.dtype for _, value in rounded.weights()} == {torch.bfloat16}
    gap = (exact.score(batch)["logprobs"] - rounded.score(batch)["logprobs"]).abs().max()
    assert 0 < float(gap) < 0.1
    assert {value.dtype for value in rounded.model.parameters()} == {torch.float32}


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(model_path, batch):
    trainer = ReferenceTrainer(model_path)
    broken = batch.replace(advantages=torch.full_like(batch.advantages, float("inf")))
    with pytest.raises(RLFlowError, match="update 0: the loss is"):
        trainer.update(broken, PPOClipLoss())
    with pytest.raises(
        RLFlowError, match="update 0: the gradient norm is"
    ):  # of a root at 0, where the loss is 0
        trainer.update(
            batch, lambda output, _: ((output.logprobs - output.logprobs.detach()).abs().sqrt(), {})
        )
    assert equal(trainer, ReferenceTrainer(model_path))


def test_zero_gradient_norm_limit_clips_nothing(model_path, batch):
    free, _ = trained(model_path, batch, updates=1, max_gradient_norm=0.0)
    loose, _ = trained(model_path, batch, updates=1, max_gradient_norm=1e9)
    assert equal(free, loose)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "runs on one device"),
        ({"dtype": "float23"}, "Did you mean 'float32'"),
        ({"schedule": "cosine"}, "missing keyword decay_steps"),
    ],
)
def test_wrong_options_fail_before_the_model_loads(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Trainer.from_pretrained(tmp_path, backend=ORACLE, **options)


def test_an_unknown_model_or_want_is_a_config_error(model_path, batch):
    trainer = ReferenceTrainer(model_path)
    with pytest.raises(ConfigError, match=r"snapshot\('reference'\) first"):
        trainer.score(batch, model="reference")
    with pytest.raises(ConfigError, match="values"):
        trainer.score(batch, want=("values",))


def test_a_directory_without_all_weights_is_a_model_error(tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelError, match=r"config\.json"):
        ReferenceTrainer(tmp_path)
    path = tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=48, tokenizer=False)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lack 1 parameters, the first is model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        ReferenceTrainer(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="transformers cannot load"):
        ReferenceTrainer(path)
