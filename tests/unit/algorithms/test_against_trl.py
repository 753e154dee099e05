"""Losses and gradients against those of TRL on the same tensors, which `bash tests/run.sh --full` installs (environments.sh)."""

from __future__ import annotations

import collections
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.base import Kernel, SumLoss
from rlflow.algorithms.losses.cispo import CISPOLoss
from rlflow.algorithms.losses.gmpo import GMPOLoss
from rlflow.algorithms.losses.gspo import GSPOLoss
from rlflow.algorithms.losses.kl import KLLoss
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.losses.soft_adaptive import SoftAdaptiveLoss
from rlflow.algorithms.transforms.mis import MaskedImportance
from rlflow.algorithms.transforms.sequence_mask import SequenceMask
from rlflow.algorithms.transforms.tis import TruncatedImportance
from rlflow.components import AGGREGATE
from rlflow.types import Batch, Loss, PolicyOutput
from tests.unit.algorithms.tensors import random_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # TRL takes seconds to import

if "RLFLOW_TRL_PACKAGES" in os.environ:
    sys.path.append(
        os.environ["RLFLOW_TRL_PACKAGES"]
    )  # last: what is tested comes from where it always does

BUDGET = 7
ON_PROXIMAL = {"anchor": "proximal"}  # TRL's old log-probs, which its corrections are relative to


class Accelerator:
    """Of one process."""

    num_processes = 1
    sync_gradients = True
    gather = gather_for_metrics = staticmethod(lambda value: value)
    reduce = staticmethod(lambda value, reduction="sum": value)


def trl_loss(batch: Batch, logprobs: Tensor, **options: Any) -> Tensor:
    """What TRL's `_compute_loss` gives for the batch at these log-probs, as a trainer of one process without accumulation."""
    trainers = pytest.importorskip("trl", reason="TRL is not installed, see tests/environments.sh")
    geometric = options.get("loss_type") == "gmpo"
    if geometric:
        from trl.experimental.gmpo import GMPOTrainer as Trainer
    else:
        Trainer = trainers.GRPOTrainer
    defaults = {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0,
        "delta": None, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "use_vllm": False,
        "use_bias_correction_kl": False, "vllm_importance_sampling_correction": True, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05, "max_completion_length": BUDGET, "_entropy_bonus_enabled": False, "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1, "steps_per_generation": 1,
    }  # fmt: skip
    trainer = Trainer.__new__(Trainer)
    values = {**defaults, **options}
    for name, value in values.items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(**values)
    trainer.accelerator = Accelerator()
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": collections.defaultdict(list)}
    entropies = torch.zeros_like(logprobs)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    mask = batch.loss_mask.to(logprobs.dtype)
    ones = torch.ones(len(batch), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": batch.tokens, "completion_mask": mask,
        "advantages": batch.advantages[:, 0], "old_per_token_logps": batch.proximal_logprobs,
        "sampling_per_token_logps": batch.logprobs, "ref_per_token_logps": batch.reference_logprobs,
        "num_items_in_batch": mask.sum(),
        **({"importance_sampling_ratio": options["ratio"]} if "ratio" in options else {}),
    }  # fmt: skip
    return Trainer._compute_loss(trainer, trainer.model, inputs)


def compare(loss: Loss, aggregate: str, batch: Batch, **options: Any) -> None:
    batch = batch.replace(weights=AGGREGATE.build(aggregate, tokens=BUDGET)(batch).double())
    sides = []
    for total_of in (
        lambda values: trl_loss(batch, values, **options),
        lambda values: (batch.weights * loss(PolicyOutput(values), batch)[0]).sum(),
    ):
        values = batch.current_logprobs.clone().requires_grad_()
        total = total_of(values)
        total.backward()
        sides.append((float(total.detach()), values.grad))
    (expected, slope), (found, own) = sides
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(own, slope, atol=1e-7, rtol=1e-5)
    assert slope.abs().max() > 1e-3


def tensors(seed: int) -> Batch:
    """Every row has a trained token: TRL counts rows without one in its mean over sequences."""
    batch = random_batch(seed=seed, rows=9, width=BUDGET).select(list(range(8)))
    assert bool(batch.loss_mask.any(dim=1).all())
    return batch.replace(reference_logprobs=batch.logprobs - 0.1)


CASES: dict[str, tuple[Kernel, str, dict[str, Any]]] = {
    "GRPO": (PPOClipLoss(0.2, 0.28, **ON_PROXIMAL), "sequence_mean", {"loss_type": "grpo"}),
    "BNPO": (PPOClipLoss(0.2, 0.28, **ON_PROXIMAL), "token_mean", {"loss_type": "bnpo"}),
    "DAPO": (PPOClipLoss(0.2, 0.28, **ON_PROXIMAL), "token_mean", {"loss_type": "dapo"}),
    "Dr.GRPO": (PPOClipLoss(0.2, 0.28, **ON_PROXIMAL), "constant", {"loss_type": "dr_grpo"}),
    "GSPO": (
        GSPOLoss(0.2, 0.28, **ON_PROXIMAL),
        "sequence_mean",
        {"importance_sampling_level": "sequence"},
    ),
    "GSPO, narrow": (
        GSPOLoss(3e-4, 4e-4, **ON_PROXIMAL),
        "sequence_mean",
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "GMPO": (
        GMPOLoss(**ON_PROXIMAL),
        "sequence_mean",
        {"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4},
    ),
    "CISPO": (
        CISPOLoss(clip_high=0.28, **ON_PROXIMAL),
        "token_mean",
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "CISPO, 5": (
        CISPOLoss(clip_high=4.0, **ON_PROXIMAL),
        "token_mean",
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "SAPO": (SoftAdaptiveLoss(**ON_PROXIMAL), "sequence_mean", {"loss_type": "sapo"}),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_agree(case, seed):
    kernel, aggregate, options = case
    compare(kernel, aggregate, tensors(seed), **options)


@pytest.mark.parametrize(("estimator", "weighted"), [("k3", False), ("wk3", True)])
def test_kl_beside_a_kernel_agrees(estimator, weighted):
    losses = SumLoss((PPOClipLoss(0.2, 0.28, **ON_PROXIMAL), KLLoss(0.1, estimator, **ON_PROXIMAL)))
    compare(
        losses,
        "token_mean",
        tensors(0),
        loss_type="dapo",
        beta=0.1,
        use_bias_correction_kl=weighted,
    )


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("way", ["truncate", "mask"])
def test_importance_corrections_agree_with_those_of_a_loss_that_is_given_the_ratio(
    loss_type, level, way
):
    """TRL makes the ratio while it generates; here it is made by its formula, a line each, and goes through its loss."""
    batch = tensors(1)
    gap = (batch.proximal_logprobs - batch.logprobs) * batch.loss_mask
    ratio = (gap.sum(-1, keepdim=True) if level == "sequence" else gap).exp()
    ratio = ratio.clamp(max=1.5) if way == "truncate" else ratio.masked_fill(ratio > 1.5, 0.0)
    correction = (
        TruncatedImportance(1.5, level=level)
        if way == "truncate"
        else MaskedImportance(1.5, level=level)
    )
    kernel, aggregate, _ = CASES["DAPO" if loss_type == "dapo" else "SAPO"]
    compare(
        kernel,
        aggregate,
        correction(batch),
        loss_type=loss_type,
        use_vllm=True,
        ratio=ratio.expand(gap.shape),
    )


@pytest.mark.parametrize("threshold", [0.01, 0.04])
def test_the_mask_of_off_policy_sequences_agrees(threshold):
    batch = SequenceMask(threshold)(tensors(2))
    assert 0 < (batch.coefficients == 0).float().mean() < 1
    compare(CASES["GRPO"][0], "sequence_mean", batch, off_policy_mask_threshold=threshold)
