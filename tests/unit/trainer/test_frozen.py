"""A second, frozen model beside the policy, its likeliest tokens, and losses on them: against transformers and the reference
trainer; several ranks: tests/dist/test_teacher_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.algorithms import SFTLoss, SumLoss
from rlflow.algorithms.losses.teacher_kl import TeacherKLLoss
from rlflow.errors import ConfigError, RLFlowError
from rlflow.models.huggingface import digest
from rlflow.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Batch
from tests import rounding
from tests.reference import ORACLE
from tests.unit.trainer.backends import BACKENDS
from tests.unit.trainer.batches import VOCAB, make_batch

K = 5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family, larger, with rows of padding in its vocabulary."""
    path = tmp_path_factory.mktemp("teacher")
    return tiny_model(
        path,
        "llama",
        tokenizer=False,
        seed=1,
        vocab_size=VOCAB + 11,
        hidden_size=48,
        num_hidden_layers=3,
    )


def taught(batch: Batch, scores: dict[str, Tensor]) -> Batch:
    extras = {TEACHER_TOP_IDS: scores["top_ids"], TEACHER_TOP_LOGPROBS: scores["top_logprobs"]}
    return batch.replace(teacher_logprobs=scores["logprobs"], extras=extras)


@pytest.mark.parametrize(("backend", "tokens_per_microbatch"), [(ORACLE, 4096), ("megatron", 20)])
def test_scores_are_transformers_at_the_rows_temperature(
    make: Any, teacher: Path, backend: str, tokens_per_microbatch: int
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make(backend=backend, tokens_per_microbatch=tokens_per_microbatch)
    trainer.load_frozen("teacher", teacher)
    batch = make_batch().replace(temperatures=torch.tensor([0.5, 0.8, 1.0, 1.3, 2.0, 0.0]))
    scores = trainer.score(batch, "teacher", top_k=K)
    oracle = AutoModelForCausalLM.from_pretrained(str(teacher), dtype=torch.float32).eval()
    for row, length in enumerate(batch.lengths.tolist()):
        logits = oracle(batch.tokens[row : row + 1, :length]).logits[0, :-1].detach() / (
            float(batch.temperatures[row]) or 1.0
        )
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, batch.tokens[row, 1:length, None])[:, 0]
        torch.testing.assert_close(scores["logprobs"][row, 1:length], chosen, atol=1e-5, rtol=0)
        top = logprobs[:, :VOCAB].topk(K, dim=1)  # what the policy can say
        assert torch.equal(scores["top_ids"][row, 1:length], top.indices)
        torch.testing.assert_close(
            scores["top_logprobs"][row, 1:length], top.values, atol=1e-5, rtol=0
        )
        for name in ("logprobs", "top_ids", "top_logprobs"):
            assert not scores[name][row, 0].any() and not scores[name][row, length:].any()


def test_the_teacher_stays_while_the_policy_moves_and_is_not_in_the_checkpoint(
    make: Any, teacher: Path, tmp_path: Path
) -> None:
    trainer, batch = make(), make_batch()
    trainer.load_frozen("teacher", teacher)
    before, start = trainer.score(batch, "teacher")["logprobs"], digest(trainer.weights())
    trainer.update(batch, SFTLoss())
    trainer.save(tmp_path / "checkpoint", 1)
    assert (
        torch.equal(trainer.score(batch, "teacher")["logprobs"], before)
        and digest(trainer.weights()) != start
    )
    other = make()
    other.load(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="there is no model 'teacher'; known: policy"):
        other.score(batch, "teacher")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_of_a_frozen_models_name_is_refused(
    make: Any, teacher: Path, backend: str
) -> None:
    """It would never be scored with: the frozen model would."""
    trainer = make(backend=backend)
    trainer.load_frozen("teacher", teacher)
    with pytest.raises(
        ConfigError, match="snapshot: 'teacher' is taken; choose a name other than policy, teacher"
    ):
        trainer.snapshot("teacher")


@pytest.mark.parametrize("tokens_per_microbatch", [20, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_forward_kl_moves_megatron_as_it_moves_the_reference_trainer(
    make: Any, teacher: Path, tokens_per_microbatch: int
) -> None:
    loss, options = (
        SumLoss((TeacherKLLoss(), SFTLoss())),
        {"optimizer": {"name": "adamw", "eps": 1e-3}},
    )
    reference = make(backend=ORACLE, **options)
    reference.load_frozen("teacher", teacher)
    batch = taught(make_batch(), reference.score(make_batch(), "teacher", top_k=K))
    trainer = make(tokens_per_microbatch=tokens_per_microbatch, logits_chunk_mib=0.01, **options)
    expected, found = reference.update(batch, loss), trainer.update(batch, loss)
    for name in ("loss", "teacher_kl", "teacher_mass", "nll", "gradient_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    exact = rounding.Updates(lambda: make(backend=ORACLE, **options), batch, loss, 1)
    theirs = dict(reference.weights())
    for name, ours in trainer.weights():
        assert ((ours - theirs[name]).abs() <= exact.most_apart(name, ours)).all(), name


def test_mistakes_are_one_error(make: Any, teacher: Path) -> None:
    trainer, batch = make(), make_batch()
    trainer.load_frozen("teacher", teacher)
    for name in ("teacher", "policy"):
        with pytest.raises(ConfigError, match=f"'{name}' is taken"):
            trainer.load_frozen(name, teacher)
    with pytest.raises(ConfigError, match=f"top_k must be 0 to {VOCAB}.*found 500"):
        trainer.score(batch, "teacher", top_k=500)
    with pytest.raises(RLFlowError, match=r"needs top_logprobs.*algorithm.teacher.top_k"):
        trainer.update(batch, TeacherKLLoss())
