"""LoRA written out in torch, and what each rank of its layout tests does: trains adapters, saves, goes on; loads and goes on."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.models.huggingface import iterate_weights
from rlflow.types import Batch, PolicyOutput
from tests.dist.megatron_ranks import UPDATES, PolicyGradientWithEntropy, make_batch

VOCAB = 301  # odd, so that every split pads it
RANK, ALPHA = 4, 12.0
LORA: dict[str, Any] = {"rank": RANK, "alpha": ALPHA}
LR = 1e-2  # B starts as 0, and only once it has grown do the gradients of A say something
EPS = 1e-3  # with Adam's usual one, an element with nearly no gradient moves by its rounding error divided by its own size
OPTIONS: dict[str, Any] = {
    "lr": LR,
    "tokens_per_microbatch": 96,
    "optimizer": {"name": "adamw", "eps": EPS, "weight_decay": 0.1},
    "lora": LORA,
    "seed": 5,
}
LOSS = PolicyGradientWithEntropy()


class PlainLora:
    """The oracle: the weight of every target is W + alpha / rank * B A in a transformers model, and torch does the rest:
    autograd, clipping, AdamW. It shares with the trainers nothing but the factors that it begins with."""

    def __init__(self, path: Path, factors: dict[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(
            False
        )
        self.base = dict(iterate_weights(path))
        self.factors = {name: value.clone().requires_grad_() for name, value in factors.items()}
        self.adam = torch.optim.AdamW(
            list(self.factors.values()), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1
        )

    def weights(self) -> dict[str, Tensor]:
        """The merged model."""
        merged = dict(self.base)
        for name, b in self.factors.items():
            if name.endswith(".lora_B.weight"):
                layer = name.removesuffix(".lora_B.weight")
                a = self.factors[f"{layer}.lora_A.weight"]
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + ALPHA / RANK * (b @ a)
        return merged

    def score(self, batch: Batch) -> PolicyOutput:
        """Log-probs and entropies (B, T) at the rows' temperatures; 0 at padding."""
        logits = torch.func.functional_call(
            self.model, self.weights(), (), {"input_ids": batch.tokens}
        ).logits
        logprobs = (logits[:, :-1] / batch.temperatures[:, None, None]).log_softmax(-1)
        valid = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
        chosen = logprobs.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return PolicyOutput(
            *(torch.nn.functional.pad(value * valid, (1, 0)) for value in (chosen, entropy))
        )

    def update(self, batch: Batch) -> dict[str, Any]:
        """One step; loss, gradient norm, and the gradients after clipping."""
        self.adam.zero_grad()
        loss = (batch.weights * LOSS(self.score(batch), batch)[0]).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.factors.values(), 1.0)
        gradients = {
            name: value.grad.clone()
            for name, value in self.factors.items()
            if value.grad is not None
        }
        self.adam.step()
        return {"loss": loss.item(), "gradient_norm": norm.item(), "gradients": gradients}


def drawn_by_hand(layer: str, inputs: int, seed: int) -> Tensor:
    """A as it starts: uniform within 1 / sqrt(in), which is kaiming_uniform_ with a = sqrt(5)."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{layer}".encode()))
    return (2 * torch.rand(RANK, inputs, generator=draw) - 1) / inputs**0.5


def gathered_gradients(trainer: Any) -> dict[str, Tensor]:
    """Those of the last update, as the optimizer had them: put together from all ranks in the way of the adapters themselves."""
    from rlflow.trainer.megatron.model import trained_parameters

    parameters = [parameter for _, parameter in trained_parameters(trainer._chunks)]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    try:
        return dict(trainer.adapter_weights())
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value


def train(
    model: Path,
    batch: Batch,
    options: dict[str, Any],
    save_to: Path | None = None,
    load_from: Path | None = None,
) -> dict[str, Any]:
    """Everything that the tests compare: updates with their gradients, adapters and merged weights before and after; then
    of one update after a save, and of one after loading another layout's checkpoint."""
    from rlflow.trainer.base import Trainer

    trainer: Any = Trainer.from_pretrained(model, **{**OPTIONS, **options})
    result: dict[str, Any] = {
        "start": dict(trainer.adapter_weights()),
        "start_weights": dict(trainer.weights()),
    }
    result["score"] = trainer.score(batch)["logprobs"]
    trainer.snapshot("reference")
    result["metrics"], result["gradients"] = [], []
    for _ in range(UPDATES):
        result["metrics"].append(trainer.update(batch, LOSS))
        if (
            "distributed_optimizer" not in options
        ):  # there each rank has the sum of its own part only
            result["gradients"].append(gathered_gradients(trainer))
    trainer.snapshot("proximal")
    result |= {"adapters": dict(trainer.adapter_weights()), "weights": dict(trainer.weights())}
    result["halved"] = dict(trainer.weights(merged=torch.bfloat16))
    result["arrived"] = trainer.adapters_arrived()
    result["after"] = trainer.score(batch)["logprobs"]
    if save_to is not None:
        trainer.save(save_to, UPDATES)
        result |= {
            "next_metrics": trainer.update(batch, LOSS),
            "next": dict(trainer.adapter_weights()),
        }
    result["reference"] = trainer.score(batch, "reference")["logprobs"]
    result["proximal"] = trainer.score(batch, "proximal")["logprobs"]
    if load_from is not None:
        assert trainer.load(load_from) == UPDATES
        result["loaded"] = dict(trainer.adapter_weights())
        result["loaded_metrics"] = trainer.update(batch, LOSS)
    trainer.close()
    return result


def train_plainly(model: Path, batch: Batch, factors: dict[str, Tensor]) -> dict[str, Any]:
    """The same from the oracle."""
    plain = PlainLora(model, factors)
    with torch.no_grad():
        start = plain.score(batch).logprobs
    metrics = [plain.update(batch) for _ in range(UPDATES)]
    with torch.no_grad():
        return {
            "score": start,
            "metrics": metrics,
            "adapters": {name: value.detach().clone() for name, value in plain.factors.items()},
            "weights": plain.weights(),
            "after": plain.score(batch).logprobs,
        }


def make_job(
    directory: Path, model: str, case: str, options: dict[str, Any], saved: bool = True
) -> dict[str, Any]:
    """For the ranks of `megatron_ranks`: trains and saves, then goes on from what one process has saved."""
    place = f"lora-{case.replace(' ', '-')}"
    return {
        "train": train,
        "model": directory / model,
        "batch": make_batch(VOCAB),
        "options": options,
        "save_to": directory / f"ranks-{place}" if saved else None,
        "load_from": directory / f"lora-{model}",
        "result": directory / f"{place}.pt",
    }


def train_alone(directory: Path, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process, which leaves the checkpoint that the ranks load; and the oracle."""
    batch = make_batch(VOCAB)
    alone = train(directory / model, batch, {}, save_to=directory / f"lora-{model}")
    return alone, train_plainly(directory / model, batch, alone["start"])


def check_against_plain(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Gradients, updates and merged weights to 1e-5, of a result of `train`."""
    for got, wanted in zip(found["metrics"], plain["metrics"], strict=True):
        assert abs(got["loss"] - wanted["loss"]) <= 1e-5 * max(1.0, abs(wanted["loss"]))
        assert abs(got["gradient_norm"] - wanted["gradient_norm"]) <= 1e-5 * wanted["gradient_norm"]
    for got, wanted in zip(
        found["gradients"], (metrics["gradients"] for metrics in plain["metrics"])
    ):
        assert set(got) == set(wanted)
        whole = torch.cat([value.flatten() for value in wanted.values()]).norm()
        for name, gradient in wanted.items():
            assert (got[name] - gradient).norm() <= 1e-5 * whole, name
    for kind in ("adapters", "weights"):
        assert set(found[kind]) == set(plain[kind])
        for name, value in plain[kind].items():
            torch.testing.assert_close(found[kind][name], value, atol=1e-5, rtol=1e-5, msg=name)
    for kind in ("score", "after"):
        torch.testing.assert_close(found[kind], plain[kind], atol=5e-5, rtol=0)


def check_layout(job: dict[str, Any], alone: dict[str, Any], plain: dict[str, Any]) -> None:
    """The ranks against the oracle; checkpoints of one process on the ranks and of the ranks in one process."""
    found = torch.load(job["result"], weights_only=False)
    check_against_plain(found, plain)
    assert found["same_on_all_ranks"]
    assert abs(found["arrived"] - alone["arrived"]) < 0.01 and alone["arrived"] < 1
    adapted = {name.replace("lora_B.", "") for name in found["adapters"] if "lora_B" in name}
    for name, value in found["weights"].items():
        halved = value.bfloat16() if name in adapted else value
        assert torch.equal(found["halved"][name], halved), name
    for name, value in alone["start"].items():
        assert torch.equal(found["start"][name], value), name
    for name, value in iterate_weights(job["model"]):
        assert torch.equal(found["start_weights"][name], value), name
    assert torch.equal(found["reference"], found["score"]), "the reference is not the base"
    assert torch.equal(found["proximal"], found["after"]), "the snapshot moved with the policy"
    for name, value in alone["adapters"].items():
        assert torch.equal(found["loaded"][name], value), name
    assert abs(found["loaded_metrics"]["loss"] - alone["next_metrics"]["loss"]) <= 1e-5
    if job["save_to"] is not None:
        continued = train(job["model"], job["batch"], {}, load_from=job["save_to"])
        for name, value in found["adapters"].items():
            assert torch.equal(continued["loaded"][name], value), name
        for metric in ("loss", "gradient_norm"):
            assert abs(continued["loaded_metrics"][metric] - found["next_metrics"][metric]) <= 2e-5
