"""A teacher of another size, and the forward KL to it, on four real ranks: what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms import SFTLoss, SumLoss
from rlflow.algorithms.losses.teacher_kl import TeacherKLLoss
from rlflow.trainer.base import Trainer
from rlflow.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS
from tests import rounding
from tests.dist.megatron_ranks import OPTIONS, Ranks, make_batch
from tests.reference import ORACLE

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB, K = 301, 6
LOSS = SumLoss((TeacherKLLoss(), SFTLoss()))
CASES: dict[str, dict[str, Any]] = {
    "DP4": {},
    "TP2 DP2": {"tensor_parallel": 2},
    "PP2 DP2": {"pipeline_parallel": 2},
    "CP2 DP2": {"context_parallel": 2},
    "TP2 PP2 SP packed, chunked": {
        "tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True, "packing": True, "logits_chunk_mib": 0.01,
    },
    "TP2 CP2 DO": {"tensor_parallel": 2, "context_parallel": 2, "distributed_optimizer": True},
    "PP2 VPP2 CP2": {"pipeline_parallel": 2, "virtual_pipeline": 2, "context_parallel": 2},
    "DP4, row by row": {"tokens_per_microbatch": 1},
}  # fmt: skip


def distill(policy: Path, teacher: Path, **options: Any) -> dict[str, Any]:
    """The teacher's scores, and what one update towards it does."""
    trainer, batch = Trainer.from_pretrained(policy, **{**OPTIONS, **options}), make_batch(VOCAB)
    trainer.load_frozen("teacher", teacher)
    scores = trainer.score(batch, "teacher", top_k=K)
    batch = batch.replace(
        extras={TEACHER_TOP_IDS: scores["top_ids"], TEACHER_TOP_LOGPROBS: scores["top_logprobs"]}
    )
    metrics = trainer.update(batch, LOSS)
    result = {
        "scores": scores,
        "metrics": metrics,
        "weights": dict(trainer.weights()),
        "batch": batch,
    }
    trainer.close()
    return result


def distill_on_rank(rank: int, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        result = distill(job["policy"], job["teacher"], **job["options"])
        if rank == 0:
            torch.save(result, job["result"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """By case; "one": a single process."""
    path = tmp_path_factory.mktemp("distillation")
    sizes = {"tokenizer": False, "vocab_size": VOCAB, "num_hidden_layers": 4}
    policy = tiny_model(path / "policy", tied=True, **sizes)
    teacher = tiny_model(
        path / "teacher", "qwen3", seed=1, **{**sizes, "hidden_size": 96, "num_hidden_layers": 8}
    )
    jobs = [
        {"policy": policy, "teacher": teacher, "options": options, "result": path / f"{number}.pt"}
        for number, options in enumerate(CASES.values())
    ]
    ranks.run(path, jobs, 500, distill_on_rank)
    results = {
        case: torch.load(job["result"], weights_only=False)
        for case, job in zip(CASES, jobs, strict=True)
    }
    return {"one": distill(policy, teacher), "policy": policy, **results}  # type: ignore[dict-item]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_what_one_process_gives(found: dict[str, Any], case: str) -> None:
    one, many = found["one"], found[case]
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(many["scores"][name], one["scores"][name], atol=2e-5, rtol=0)
    assert torch.equal(many["scores"]["top_ids"], one["scores"]["top_ids"])
    for name in ("loss", "teacher_kl", "teacher_mass", "gradient_norm"):
        assert many["metrics"][name] == pytest.approx(one["metrics"][name], rel=2e-5), name
    reference = {key: value for key, value in OPTIONS.items() if key != "tokens_per_microbatch"}
    exact = rounding.Updates(
        lambda: Trainer.from_pretrained(found["policy"], ORACLE, **reference),
        one["batch"],
        LOSS,
        1,
    )
    for name, ours in many["weights"].items():
        assert ((ours - one["weights"][name]).abs() <= exact.most_apart(name, ours)).all(), name
