"""The Megatron trainer on one rank: against transformers with torch's AdamW, and against itself."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import tiny_model
from safetensors.torch import save_file
from torch import Tensor

from rlflow.algorithms import PPOClipLoss
from rlflow.errors import ConfigError, DataError, MissingPackageError, ModelError, RLFlowError
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.models.weight_files import write_model
from rlflow.run.export import check_export
from rlflow.trainer.base import Trainer
from rlflow.trainer.schedule import cosine
from rlflow.types import Batch, PolicyOutput
from tests import rounding
from tests.reference import ORACLE
from tests.unit.trainer.backends import BACKENDS
from tests.unit.trainer.batches import VOCAB, make_batch, policy_gradient


def test_collectives_of_some_ranks_wait_as_long_as_those_of_all(make: Any) -> None:
    """Megatron gives its groups 30 minutes, whatever the ranks met with."""
    limit = datetime.timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        trainer = make()
        for group in (trainer._world.tensor_group, trainer._world.data_group):
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
        trainer.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "chunk_mib", [512.0, 1e308, 0.005], ids=["one-chunk", "any-size", "12-positions-per-chunk"]
)
def test_three_updates_equal_transformers_with_adamw(
    make: Any, model: Path, chunk_mib: float
) -> None:
    """The whole step by other means: full logits, torch's clipping and AdamW, no decay of one-dimensional parameters."""
    from transformers import AutoModelForCausalLM

    schedule = {"warmup_steps": 2, "decay_steps": 5, "min_lr": 1e-4}
    trainer = make(
        lr=3e-3,
        schedule={"name": "cosine", **schedule},
        optimizer={"name": "adamw", "weight_decay": 0.1, "eps": 1e-5},
        max_gradient_norm=0.5,
        tokens_per_microbatch=50,
        logits_chunk_mib=chunk_mib,
    )
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    matrices = [parameter for parameter in oracle.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in oracle.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5)
    for number in range(3):
        batch = make_batch(seed=number)
        logits = oracle(batch.tokens).logits[:, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        loss = -(batch.weights * batch.advantages)[:, 1:].mul(logprobs).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = cosine(number, 3e-3, **schedule)
        adam.step()

        metrics = trainer.update(batch, policy_gradient)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert norm > 0.5, "the clipping was not exercised"
        assert metrics["lr"] == cosine(number, 3e-3, **schedule)
        assert metrics["tokens"] == batch.lengths.sum()
        assert metrics["microbatches"] > 1
    expected = dict(oracle.named_parameters())
    for name, tensor in trainer.weights():
        assert (tensor - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_weights_are_copies_on_a_device_or_what_the_trainer_has(make: Any) -> None:
    trainer = make()
    copies, own = dict(trainer.weights()), dict(trainer.weights(None))
    memory = {
        parameter.untyped_storage().data_ptr()
        for chunk in trainer._chunks
        for parameter in chunk.parameters()
    }
    assert list(copies) == list(own) and all(torch.equal(copies[name], own[name]) for name in own)
    assert not {value.untyped_storage().data_ptr() for value in copies.values()} & memory
    assert own["model.norm.weight"].untyped_storage().data_ptr() in memory


def test_update_is_invariant_to_micro_batches_and_padding(make: Any) -> None:
    batch = make_batch()
    wide = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, 9))
        for name in ("tokens", "loss_mask", "logprobs", "advantages", "weights")
    }
    results = []
    adamw = {"name": "adamw", "eps": 1e-5}
    exact = rounding.Updates(
        lambda: make(backend=ORACLE, optimizer=adamw), batch, policy_gradient, updates=1
    )
    for limit, rows in ((16384, batch), (40, batch), (1, batch), (16384, batch.replace(**wide))):
        trainer = make(tokens_per_microbatch=limit, optimizer=adamw)
        results.append((trainer.update(rows, policy_gradient), dict(trainer.weights())))
    (first, weights), others = results[0], results[1:]
    assert first["microbatches"] == 1
    assert others[1][0]["microbatches"] == 6
    for metrics, other in others:
        for key in ("loss", "gradient_norm", "logprob"):
            assert metrics[key] == pytest.approx(first[key], rel=1e-5)
        for name, tensor in weights.items():
            assert ((other[name] - tensor).abs() <= exact.most_apart(name, tensor)).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_are_means_whatever_the_weights_sum_to(make: Any, backend: str) -> None:
    """Dr.GRPO's constant weights sum to the used share of the token budget; an entropy in nats stays one."""
    batch = make_batch()
    whole = make(backend=backend).update(batch, policy_gradient)
    third = make(backend=backend).update(batch.replace(weights=batch.weights / 3), policy_gradient)
    assert third["logprob"] == pytest.approx(whole["logprob"], rel=1e-6)
    assert third["loss"] == pytest.approx(whole["loss"] / 3, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_is_one_clear_error(make: Any, backend: str) -> None:
    with pytest.raises(RLFlowError, match="the batch has no rows"):
        make(backend=backend).update(make_batch().select([]), policy_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_own_loop_that_forgets_the_weights_is_told_so(make: Any, backend: str) -> None:
    """A training step's batch may come without any: a transform took them all."""
    batch = make_batch()
    batch, trainer = batch.replace(weights=torch.zeros(batch.tokens.shape)), make(backend=backend)
    with pytest.raises(RLFlowError, match="weights is 0 everywhere"):
        trainer.update(batch, policy_gradient)
    with pytest.raises(
        RLFlowError, match=r"Batch\.advantages: expected \(rows, tokens\) = \(6, 20\), found \(6,\)"
    ):
        trainer.update(batch.replace(advantages=torch.ones(6)), policy_gradient)
    for wrong in ("ppo_clip", PPOClipLoss):
        with pytest.raises(ConfigError, match="expected a loss, as PPOClipLoss"):
            trainer.update(make_batch(), wrong)
    of_step = batch.replace(trainer_version=torch.zeros_like(batch.lengths))
    assert trainer.update(of_step, policy_gradient)["updates_skipped"] == 1


def test_tokens_without_weight_after_the_last_weighted_one_change_no_gradient(make: Any) -> None:
    """Observation tokens are never trained: exchanging a trailing one moves nothing."""
    batch = make_batch()
    last = int(batch.lengths[0]) - 1
    weights = batch.weights.clone()
    weights[0, last] = 0
    other = batch.tokens.clone()
    other[0, last] = VOCAB - other[0, last]
    first, second = make(), make()
    assert (
        first.update(batch.replace(weights=weights), policy_gradient)["gradient_norm"]
        == second.update(batch.replace(weights=weights, tokens=other), policy_gradient)[
            "gradient_norm"
        ]
    )
    assert digest(first.weights()) == digest(second.weights())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_describes_trained_tokens_only_and_a_score_all(
    make: Any, model: Path, backend: str
) -> None:
    batch, seen = make_batch(), []

    def watch(output: PolicyOutput, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(output.logprobs.detach())
        return -part.advantages * output.logprobs, {}

    trainer = make(backend=backend)
    scores = trainer.score(batch)["logprobs"]
    trainer.update(batch, watch)
    assert (scores != 0).sum() == int((batch.lengths - 1).sum())
    _, bound = rounding.logprobs(model, rounding.rows_of(batch), temperature=0.8)
    torch.testing.assert_close(seen[0], scores * batch.loss_mask, atol=2 * bound, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_a_score_of_wanted_tokens_equals_that_of_all_and_computes_no_other(
    make: Any, packing: bool
) -> None:
    trainer, batch = make(packing=packing, tokens_per_microbatch=40), make_batch()
    want = ("logprobs", "entropy")
    whole = trainer.score(batch, want=want, top_k=3)
    found = trainer.score(batch.replace(wanted=batch.trained), want=want, top_k=3)
    places = batch.trained.clone()
    places[:, 0] = False
    assert 0 < int(places.sum()) < int(batch.lengths.sum()) - len(batch)
    for name, values in found.items():
        torch.testing.assert_close(values[places], whole[name][places], rtol=0, atol=1e-6)
        assert not values[~places].any() and whole[name][~batch.trained].any()


def test_snapshot_stays_and_leaves_the_policy_alone(make: Any) -> None:
    trainer, batch = make(), make_batch()
    before = trainer.score(batch)["logprobs"]
    trainer.snapshot("reference")
    trainer.update(batch, policy_gradient)
    after = trainer.score(batch)["logprobs"]
    assert torch.equal(trainer.score(batch, model="reference")["logprobs"], before)
    assert torch.equal(trainer.score(batch)["logprobs"], after)
    assert not torch.equal(before, after)


def test_weights_are_copies(make: Any) -> None:
    trainer = make()
    weights = dict(trainer.weights())
    before = digest(weights.items())
    trainer.update(make_batch(), policy_gradient)
    assert digest(weights.items()) == before != digest(trainer.weights())


def test_a_model_that_cannot_be_loaded_leaves_no_process_group(model: Path, tmp_path: Path) -> None:
    wrong = [
        (name, tensor[:-1] if "down_proj" in name else tensor)
        for name, tensor in iterate_weights(model)
    ]
    save_file({name: tensor.contiguous() for name, tensor in wrong}, tmp_path / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(ModelError, match="has shape"):
        Trainer.from_pretrained(tmp_path)
    assert not torch.distributed.is_initialized()


def test_export_gives_the_trainers_logits(make: Any, model: Path, tmp_path: Path) -> None:
    trainer = make(lr=1e-2)
    trainer.update(make_batch(), policy_gradient)
    write_model(tmp_path / "out", trainer.weights(), model)
    assert check_export(trainer, tmp_path / "out") < 1e-5
    with pytest.raises(ModelError, match="does not compute what the trainer does"):
        check_export(trainer, model)


def test_a_bfloat16_export_is_held_to_what_rounding_explains(
    make: Any, model: Path, tmp_path: Path
) -> None:
    trainer = make(dtype="bfloat16")
    write_model(tmp_path / "out", trainer.weights(), model)
    with pytest.raises(ModelError, match="does not compute what the trainer does"):
        check_export(trainer, tmp_path / "out")
    assert 1e-4 < check_export(trainer, tmp_path / "out", "bfloat16") < 0.05
    other = tiny_model(tmp_path / "other", "qwen2", tied=True, tokenizer=False, vocab_size=VOCAB, hidden_size=32,
                       intermediate_size=48, seed=1)  # fmt: skip
    with pytest.raises(ModelError, match=r"nats in the mean, at most 0\.0"):
        check_export(trainer, other, "bfloat16")


def test_bfloat16_trains_close_to_float32(make: Any) -> None:
    exact, rounded, batch = make(), make(dtype="bfloat16"), make_batch()
    assert {tensor.dtype for _, tensor in rounded.weights()} == {torch.bfloat16}
    for _ in range(3):
        expected, got = exact.update(batch, policy_gradient), rounded.update(batch, policy_gradient)
        assert got["loss"] == pytest.approx(expected["loss"], abs=0.05)
        assert got["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradients_stop_before_the_weights_change(
    make: Any, model: Path, value: float
) -> None:
    trainer, batch = make(), make_batch()
    advantages = batch.advantages.clone()
    advantages[0, -1] = value
    with pytest.raises(RLFlowError, match="the loss is"):
        trainer.update(batch.replace(advantages=advantages), policy_gradient)
    assert digest(trainer.weights()) == digest(iterate_weights(model))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_not_finite_is_refused_though_its_gradients_are(
    make: Any, backend: str
) -> None:
    def endless(output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return output.logprobs + torch.inf, {}

    trainer, batch = make(backend=backend), make_batch()
    before = digest(trainer.weights())
    with pytest.raises(RLFlowError, match=r"the loss is (inf|nan), expected a finite number"):
        trainer.update(batch, endless)
    assert digest(trainer.weights()) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_without_gradient_moves_nothing_not_even_by_momentum(
    make: Any, backend: str
) -> None:
    trainer, batch = (
        make(backend=backend, optimizer={"name": "adamw", "weight_decay": 0.1}),
        make_batch(),
    )
    assert "updates_skipped" not in trainer.update(batch, policy_gradient)
    before = digest(trainer.weights())
    metrics = trainer.update(
        batch.replace(advantages=torch.zeros_like(batch.advantages)), policy_gradient
    )
    assert (metrics["gradient_norm"], metrics["updates_skipped"]) == (0.0, 1.0)
    assert digest(trainer.weights()) == before
    trainer.update(batch, policy_gradient)
    assert digest(trainer.weights()) != before


def test_a_summed_loss_is_refused(make: Any) -> None:
    with pytest.raises(RLFlowError, match=r"'loss' has shape \(6,\)"):
        make().update(make_batch(), lambda output, batch: (output.logprobs.sum(1), {}))


def test_wrong_arguments_are_one_line_each(make: Any, model: Path) -> None:
    batch = make_batch()
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide"):
        make(tensor_parallel=3)
    with pytest.raises(
        ConfigError, match=r"context_parallel = 2 x 1 x 1 = 2, found 1; set cluster\.ranks=2"
    ):
        make(tensor_parallel=2)
    with pytest.raises(ConfigError, match="found 'float16'"):
        make(dtype="float16")
    with pytest.raises(
        ConfigError,
        match=r"trainer\.recompute: .* found 'selectiv' \(text\)\. Did you mean 'selective'",
    ):
        make(recompute="selectiv")
    with pytest.raises(
        ConfigError, match=r"trainer\.schedule: unknown name 'cosinus'\. Did you mean 'cosine'"
    ):
        make(schedule="cosinus")
    with pytest.raises(
        ConfigError,
        match=r"trainer: unknown keyword 'tensor_paralel'\. Did you mean 'tensor_parallel'",
    ):
        make(tensor_paralel=2)
    trainer = make()
    with pytest.raises(ConfigError, match="no model 'referense'; known: policy"):
        trainer.score(batch, model="referense")
    with pytest.raises(ConfigError, match=r"found 'logprob'\. Did you mean 'logprobs'"):
        trainer.score(batch, want=("logprob",))
    with pytest.raises(
        ConfigError, match="snapshot: 'policy' is taken; choose a name other than policy"
    ):
        trainer.snapshot("policy")
    with pytest.raises(DataError, match=f"token ids must be 0 to {VOCAB - 1}"):
        trainer.score(batch.replace(tokens=batch.tokens + VOCAB))
    with pytest.raises(RLFlowError, match="no rows"):
        trainer.update(batch.select([]), policy_gradient)


def test_groups_of_one_rank_are_one_group(make: Any) -> None:
    """Gloo runs a thread for every group, which wakes 70 times a second."""
    from megatron.core import parallel_state

    make()
    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_context_parallel_group(),
    ]
    assert all(group is groups[0] for group in groups)


def test_the_adaptation_leaves_nothing_behind(make: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils

    fusions = (rope_utils.fused_apply_rotary_pos_emb, rope_utils.fused_apply_rotary_pos_emb_thd)
    create = parallel_state.create_group
    patched = [
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.manual_seed,
        torch.cuda.get_rng_state,
    ]
    state = torch.get_rng_state()
    make().update(make_batch(), policy_gradient)
    assert [
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.manual_seed,
        torch.cuda.get_rng_state,
    ] == patched
    assert fusions == (
        rope_utils.fused_apply_rotary_pos_emb,
        rope_utils.fused_apply_rotary_pos_emb_thd,
    )
    assert parallel_state.create_group is create
    assert torch.equal(torch.get_rng_state(), state)


def test_a_megatron_core_that_lacks_what_is_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.tensor_parallel import random

    from rlflow.trainer.megatron.cpu import adapted

    monkeypatch.delattr(random, "_get_cuda_rng_state")
    told = r"no megatron\.core\.tensor_parallel\.random\._get_cuda_rng_state, .* expected a version from 0\.16 to 0\.19"
    with pytest.raises(MissingPackageError, match=told), adapted():
        pass


@pytest.mark.parametrize("first_closed", [0, 1], ids=["its maker first", "its maker last"])
def test_trainers_of_one_process_share_the_groups_until_the_last_is_closed(
    make: Any, first_closed: int
) -> None:
    trainers = [make(), make()]
    for trainer in (trainers[first_closed],) * 2:  # twice: a second call must not count again
        trainer.close()
    assert trainers[1 - first_closed].update(make_batch(), policy_gradient)["gradient_norm"] > 0
    trainers[1 - first_closed].close()
    assert not torch.distributed.is_initialized()


def test_a_closed_trainer_says_so(make: Any, tmp_path: Path) -> None:
    """Megatron's assertion is about its groups."""
    trainer = make()
    trainer.close()
    uses = (
        lambda: trainer.update(make_batch(), policy_gradient),
        lambda: trainer.score(make_batch()),
        lambda: trainer.save(tmp_path, 1),
        lambda: trainer.load(tmp_path),
    )
    for use in uses:
        with pytest.raises(RLFlowError, match=r"^trainer: it is closed; make a new one\.$"):
            use()
