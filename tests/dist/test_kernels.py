"""Every kernel and correction, through the real trainer: the same over four ranks in any layout, whatever the micro-batches,
as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms.algorithm import Algorithm, make_loss
from rlflow.models.huggingface import digest
from rlflow.types import Batch
from tests.dist.megatron_ranks import OPTIONS, Ranks, make_batch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB = 301
PROXIMAL = {"anchor": "proximal"}
ALGORITHMS: dict[str, tuple[list[Any], list[Any]]] = {
    "ppo_clip": ([{"name": "ppo_clip", "clip_high": 0.28, "dual_clip": 3.0}], []),
    "gspo": (
        [{"name": "gspo", "clip_low": 0.2, "clip_high": 0.3}],
        [{"name": "sequence_mask", "threshold": 0.01}],
    ),
    "gspo of tokens": (
        [{"name": "gspo", "level": "token", "clip_low": 0.2, "clip_high": 0.3}],
        [{"name": "kpop", "threshold": 1e-3}],
    ),
    "gmpo": (
        ["gmpo"],
        [{"name": "mis", "level": "geometric", "low": 0.5, "high": 2.0, "weigh": False}],
    ),
    "cispo": (["cispo"], [{"name": "dppo", "divergence": "kl", "low": 1e-5, "high": 1e-5}]),
    "aipo": ([{"name": "aipo", "max_ratio": 20.0}], [{"name": "dppo", "low": 1e-4, "high": 1e-4}]),
    "soft_adaptive": (["soft_adaptive"], [{"name": "mis", "low": 0.3, "weigh": False}]),
    "icepop": ([{"name": "ppo_clip", **PROXIMAL}], ["icepop"]),
    "reinforce and sft": (
        ["reinforce", {"name": "sft", "coefficient": 0.1}],
        [{"name": "tis", "level": "sequence"}],
    ),
    "decoupled": (
        [{"name": "ppo_clip", **PROXIMAL}],
        ["decoupled", {"name": "kpop", "threshold": 1e-3}, "kept_mean"],
    ),
    "interpolated": (
        [{"name": "ppo_clip", **PROXIMAL}],
        [{"name": "decoupled", "proximal": "loglinear"}],
    ),
    "m2po": ([{"name": "ppo_clip", "clip_low": None, "clip_high": None}], ["m2po"]),
    "m2po by range": (["ppo_clip"], [{"name": "m2po", "variant": "range"}]),
    "m2po by winsor": (["ppo_clip"], [{"name": "m2po", "variant": "winsor"}]),
    "m2po over all": (
        [{"name": "ppo_clip", **PROXIMAL}],
        [{"name": "m2po", "variant": "mask_all"}, "decoupled"],
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP4": {},
    "DP2 TP2": {"tensor_parallel": 2},
    "DP2 CP2": {"context_parallel": 2},
    "DP2 CP2 packed, small micro-batches": {
        "context_parallel": 2,
        "packing": True,
        "tokens_per_microbatch": 32,
    },
    "TP2 PP2, one micro-batch": {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "tokens_per_microbatch": 4096,
    },
}
ALONE = {
    "96 tokens": {},
    "one row": {"tokens_per_microbatch": 1},
    "all rows": {"tokens_per_microbatch": 4096},
}


def updates(model: Path, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One training step per algorithm, one after another: two minibatches, each with its transforms and one update."""
    from rlflow.loop import score_minibatch, score_step
    from rlflow.trainer.base import Trainer

    trainer = Trainer.from_pretrained(model, **{**OPTIONS, "schedule": "constant", **options})
    found = {}
    for place, (name, (losses, transforms)) in enumerate(ALGORITHMS.items()):
        algorithm = made(losses, transforms)
        batch = score_step(stale(make_batch(VOCAB, seed=place)), trainer, algorithm.needs)
        result: dict[str, Any] = {"metrics": [], "coefficients": []}
        for rows in (range(6), range(6, 11)):
            minibatch = batch.select(list(rows))
            minibatch, reported = algorithm.transform(
                score_minibatch(minibatch, trainer, algorithm.needs)
            )
            result["metrics"].append({**reported, **trainer.update(minibatch, algorithm.loss)})
            result["coefficients"].append(minibatch.coefficients)
        result["weights"] = {key: value.clone() for key, value in trainer.weights()}
        found[name] = result
    trainer.close()
    return found


def made(losses: list[Any], transforms: list[Any]) -> Algorithm:
    from rlflow.algorithms.base import as_part
    from rlflow.components import TRANSFORM

    return Algorithm(
        advantage=as_part(lambda batch: batch.advantages),
        loss=make_loss(losses),
        aggregate=lambda batch: batch.weights,
        transforms=[as_part(TRANSFORM.build(transform)) for transform in transforms],
    )


def stale(batch: Batch) -> Batch:
    """One advantage per row, and rollout log-probs of another policy: near log(1 / VOCAB), as are the model's own."""
    draw = torch.Generator().manual_seed(len(batch))
    logprobs = -5.7 + 0.3 * torch.randn(batch.tokens.shape, generator=draw)
    versions = torch.randint(0, 4, batch.tokens.shape, generator=draw)
    return batch.replace(
        logprobs=logprobs * batch.loss_mask,
        advantages=batch.advantages[:, :1].expand(batch.tokens.shape) * batch.loss_mask,
        versions=versions.masked_fill(~batch.loss_mask, -1),
        trainer_version=torch.full_like(batch.lengths, 4),
    )


def run_jobs(rank: int, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        result = updates(job["model"], job["options"])
        if rank == 0:
            torch.save(result, job["result"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "model"
    tiny_model(path, tokenizer=False, vocab_size=VOCAB, num_hidden_layers=2, scale=0.15)
    return path


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    return {name: updates(model, options) for name, options in ALONE.items()}


@pytest.fixture(scope="module")
def over_ranks(model: Path, ranks: Ranks) -> dict[str, Any]:
    jobs = {
        name: {"model": model, "options": options, "result": model.parent / f"{place}.pt"}
        for place, (name, options) in enumerate(LAYOUTS.items())
    }
    ranks.run(model.parent, list(jobs.values()), limit_s=800, work=run_jobs)
    return {name: torch.load(job["result"], weights_only=False) for name, job in jobs.items()}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        for name in set(wanted) - {"microbatches"}:
            # A loss of log-probs near -6 nats is a sum of such, of either sign, times a product of up to 30 ratios.
            margin = 2e-5 if name in ("loss", "policy_loss") else 1e-6
            assert got[name] == pytest.approx(wanted[name], rel=2e-5, abs=margin), name
    for got, wanted in zip(found["coefficients"], expected["coefficients"], strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert torch.equal(got == 0, wanted == 0), "another layout decided otherwise"
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for key, weight in expected["weights"].items():
        assert (found["weights"][key] - weight).norm() <= 1e-5 * weight.norm(), key


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_and_corrections_do_not_depend_on_the_layout(
    layout: str, algorithm: str, over_ranks: Any, alone: Any
) -> None:
    check(over_ranks[layout][algorithm], alone["96 tokens"][algorithm])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", ["one row", "all rows"])
def test_kernels_and_corrections_do_not_depend_on_micro_batches(
    size: str, algorithm: str, alone: Any
) -> None:
    check(alone[size][algorithm], alone["96 tokens"][algorithm])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_and_every_correction_bites(algorithm: str, alone: Any) -> None:
    result = alone["96 tokens"][algorithm]
    assert all(metrics["gradient_norm"] > 1e-4 for metrics in result["metrics"])
    assert len({digest(other["weights"].items()) for other in alone["96 tokens"].values()}) == len(
        ALGORITHMS
    )
    corrected = [found for found in result["coefficients"] if found is not None]
    assert len(corrected) == (
        0 if algorithm in ("ppo_clip", "m2po by range", "m2po by winsor") else 2
    )
    assert not corrected or any(bool((found != 1).any()) for found in corrected)
