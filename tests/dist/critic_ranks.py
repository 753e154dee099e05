"""What each rank of the critic's layout tests does: trains policy and critic, saves, goes on; loads and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.algorithms import SumLoss, ValueLoss
from rlflow.types import Batch
from tests.dist.megatron_ranks import OPTIONS, UPDATES, PolicyGradientWithEntropy, make_batch
from tests.reference import ORACLE

VOCAB = 301  # odd, so that every split pads it
LOSS = SumLoss((PolicyGradientWithEntropy(), ValueLoss(clip=0.3)))


def make_targets(vocab: int, rows: int = 11) -> Batch:
    """Rows of `make_batch` with old values and returns."""
    batch = make_batch(vocab, rows)
    draw = torch.Generator().manual_seed(7)
    old, noise = (torch.randn(batch.tokens.shape, generator=draw) for _ in range(2))
    return batch.replace(values=0.2 * old * batch.loss_mask, returns=noise * batch.loss_mask)


def train(
    model: Path,
    batch: Batch,
    options: dict[str, Any],
    save_to: Path | None = None,
    load_from: Path | None = None,
) -> dict[str, Any]:
    """Values, metrics of the updates and the critic's trunk; then of one update after a save, and after loading another's."""
    from rlflow.trainer.base import Trainer

    critic = {"critic": {"lr": 1e-2, "schedule": {"name": "linear", "decay_steps": 8}}}
    trainer: Any = Trainer.from_pretrained(model, **{**OPTIONS, **critic, **options})
    result: dict[str, Any] = {"metrics": [trainer.update(batch, LOSS) for _ in range(UPDATES)]}

    def look() -> dict[str, Any]:
        return {
            "values": trainer.score(batch, want=("values",))["values"],
            "weights": dict(trainer.critic.weights()),
        }

    result |= look()
    if save_to is not None:
        trainer.save(save_to, UPDATES)
        result |= {"next_metrics": trainer.update(batch, LOSS), "next": look()}
    if load_from is not None:
        assert trainer.load(load_from) == UPDATES
        result["loaded"] = look()
        result["loaded_metrics"] = trainer.update(batch, LOSS)
    trainer.close()
    return result


def make_job(
    directory: Path, model: str, case: str, options: dict[str, Any], few: bool = False
) -> dict[str, Any]:
    """For the ranks of `megatron_ranks`: trains and saves, then goes on from what `train_alone` has saved."""
    place = f"critic-{case.replace(' ', '-')}"
    return {
        "train": train,
        "model": directory / model,
        "batch": make_targets(VOCAB, 3 if few else 11),
        "options": options,
        "save_to": directory / f"ranks-{place}",
        "load_from": None if few else directory / f"critic-{model}",
        "result": directory / f"{place}.pt",
    }


def train_alone(directory: Path, model: str) -> dict[str, Any]:
    """The reference trainer, and as `alone` a Megatron process, which leaves the checkpoint that the ranks load."""
    batch = make_targets(VOCAB)
    alone = train(directory / model, batch, {}, save_to=directory / f"critic-{model}")
    return {**train(directory / model, batch, {"backend": ORACLE}), "alone": alone}


def check(job: dict[str, Any], expected: dict[str, Any]) -> None:
    """The ranks against the reference trainer; the checkpoint of one process on the ranks, and that of the ranks on one."""
    found = torch.load(job["result"], weights_only=False)
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        check_metrics(got, wanted)
    check_state(found, expected)
    assert found["same_on_all_ranks"]
    if job["load_from"] is not None:
        check_state(found["loaded"], expected["alone"])
        check_metrics(found["loaded_metrics"], expected["alone"]["next_metrics"])
    continued = train(job["model"], job["batch"], {}, load_from=job["save_to"])
    check_state(continued["loaded"], found)
    check_metrics(continued["loaded_metrics"], found["next_metrics"])


def check_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    for name in set(expected) - {"microbatches"}:
        assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


def check_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["values"], expected["values"], atol=5e-5, rtol=1e-4)
    assert set(found["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        assert (found["weights"][name] - weight).norm() <= 2e-5 * weight.norm(), name
