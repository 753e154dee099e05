"""The rule of weight probes in low precision: honest syncs pass, faults do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.rollout.probe_rule import TOKENS, agree, spacing, told

TEMPERATURE, SYNCS, CANDIDATES = 0.7, 10_000, 200
STEP = spacing(torch.bfloat16, TEMPERATURE)


def logits(tokens: int, top: float, generator: torch.Generator) -> Tensor:
    """(tokens, CANDIDATES): of one to eleven candidates near `top`, and of a tail."""
    tail = torch.randn(tokens, CANDIDATES, generator=generator) * 2.5
    near = torch.randint(1, 12, (tokens, 1), generator=generator)
    high = top - 3 * torch.rand(tokens, CANDIDATES, generator=generator)
    return torch.where(torch.arange(CANDIDATES) < near, high, tail)


def seen(exact: Tensor, noise: float, temperature: float, generator: torch.Generator) -> Tensor:
    """Log-probs of one side: logits that another order of adding moves, rounded to bfloat16."""
    moved = exact + noise * torch.randn(exact.shape, generator=generator)
    return (moved.bfloat16().float() / temperature).log_softmax(-1)


def gaps(top: float, noise: float, trainers: float = TEMPERATURE, tokens: int = 40_000) -> Tensor:
    """Of tokens that the engine samples. trainers: the temperature of the trainer's log-probs."""
    generator = torch.Generator().manual_seed(int(10 * top))
    exact = logits(tokens, top, generator)
    engine = seen(exact, noise, TEMPERATURE, generator)
    trainer = seen(exact, noise, trainers, generator)
    sampled = torch.multinomial(engine.exp(), 1, generator=generator)
    return (engine.gather(1, sampled) - trainer.gather(1, sampled)).abs()[:, 0]


def drawn(found: Tensor, syncs: int, tokens: int = TOKENS) -> Tensor:
    """(syncs, tokens)"""
    generator = torch.Generator().manual_seed(1)
    return found[torch.randint(len(found), (syncs, tokens), generator=generator)]


def test_log_probs_are_as_far_apart_as_large_logits_by_the_temperature() -> None:
    one = torch.tensor(20.0).bfloat16()
    following = torch.nextafter(one, torch.tensor(99.0).bfloat16())
    assert pytest.approx(float(following - one) / 0.7) == STEP == 0.125 / 0.7
    assert spacing(torch.bfloat16, 0.0) == 0.125
    assert spacing(torch.float16, 1.0) == 2**-6
    assert spacing(torch.float32, 1.0) == 0.0


@pytest.mark.parametrize(
    ("top", "noise"),
    [
        (12.0, 0.02),
        (60.0, 0.05),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((12.0, 0.05), (28.0, 0.02), (28.0, 0.05), (60.0, 0.02))
        ),
    ],
)
def test_ten_thousand_honest_syncs_in_bfloat16_pass(top: float, noise: float) -> None:
    """A bound of 0.2 nats on the largest of 32 tokens ended 2 to 87% of them."""
    found = gaps(top, noise)
    assert bool(agree(drawn(found, SYNCS), STEP, 0.0).all())
    ended = (drawn(found, SYNCS, 32).amax(-1) > 0.2).double().mean()
    assert ended > (0.02 if top > 16 or noise > 0.02 else 0.0)


@pytest.mark.parametrize(
    "top", [12.0, 60.0, *(pytest.param(top, marks=pytest.mark.slow) for top in (20.0, 28.0))]
)
def test_log_probs_of_another_temperature_are_found(top: float) -> None:
    missed = agree(drawn(gaps(top, 0.02, trainers=1.0), SYNCS), STEP, 0.0).double().mean()
    assert missed < 1e-3


def test_weights_of_which_every_tenth_token_shows_are_found_and_nan_is() -> None:
    found = drawn(gaps(28.0, 0.02), 1000)
    found[:, ::10] += 1.0
    assert not agree(found, STEP, 0.0).any()
    one = drawn(gaps(28.0, 0.02), 1)[0]
    assert agree(one, STEP, 0.0)
    one[3] = float("nan")
    assert not agree(one, STEP, 0.0) and not agree(one, 0.0, 1e9)


def test_in_float32_no_token_may_be_off() -> None:
    found = torch.full((TOKENS,), 1e-5)
    assert agree(found, 0.0, 1e-3)
    found[7] = 2e-3
    assert not agree(found, 0.0, 1e-3)
    assert told(found, 0.0, 1e-3) == (
        "0.002 nats on a token of the probe, more than its tolerance of 0.001"
    )
    assert "expected at most 0.116 and 0.446" in told(found, STEP, 0.0)
