"""Routes that are not those of their tokens are told from legitimate ones, and routers are described."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES, ROUTES_VERSION
from rlflow.errors import DataError
from rlflow.trainer.options import Routing
from rlflow.trainer.routing import (
    _check_distinct,
    _loads,
    check_agreement,
    check_routes,
    routing_metrics,
)
from rlflow.types import Batch
from tests.unit.trainer.batches import make_batch

EXPERTS = 8


def some_routes(
    rows: int = 4, width: int = 40, layers: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(routes, known): two of eight experts by chance; rows of different lengths."""
    draw = torch.Generator().manual_seed(seed)
    routes = torch.rand(rows, width, layers, EXPERTS, generator=draw).argsort(-1)[..., :2]
    lengths = torch.tensor([width - 5 * row for row in range(rows)])
    return routes, torch.arange(width) < lengths[:, None]


def rounded(routes: Tensor, share: float) -> Tensor:
    """With another first expert in a share of the choices."""
    change = torch.rand(routes.shape[:-1], generator=torch.Generator().manual_seed(1)) < share
    other = (torch.maximum(routes[..., 0], routes[..., 1]) + 1) % EXPERTS
    other = torch.where(other == routes[..., 1], (other + 1) % EXPERTS, other)
    return torch.stack([torch.where(change, other, routes[..., 0]), routes[..., 1]], -1)


def check(given: Tensor, own: Tensor, known: Tensor) -> None:
    check_agreement(given, own, known, EXPERTS, list(range(10, 10 + len(given))))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_what_rounding_changes_is_legitimate(share: float) -> None:
    own, known = some_routes()
    check(rounded(own, share), own, known)


def of_one_row(routes: Tensor) -> Tensor:
    return torch.cat([routes[:2], routes[2:3].roll(7, 1), routes[3:]])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda routes: routes.roll(1, 1),
            "shifted by one token: each has those of the token before it",
        ),
        (
            lambda routes: routes.roll(-1, 1),
            "shifted by one token: each has those of the token behind it",
        ),
        (lambda routes: routes.roll(1, 2), "Layer 0 has those of another layer, 2"),
        (
            lambda routes: routes[:, :, [0, 2, 1]],
            "layer 1 .*: .* Layer 1 has those of another layer, 2",
        ),
        (
            lambda routes: some_routes(seed=9)[0],
            "They may be of older weights, of another model, or of other tokens",
        ),
        (of_one_row, "batch: row 12: .*They may be of older weights"),
    ],
    ids=["before", "behind", "layers", "two layers", "weights", "one row"],
)
def test_other_routes_are_refused_by_what_they_are(fault: Any, words: str) -> None:
    own, known = some_routes()
    with pytest.raises(DataError, match=words) as raised:
        check(fault(own), rounded(own, 0.05), known)
    assert "set trainer.router_replay=recompute" in str(raised.value)


def test_where_all_tokens_go_to_the_same_experts_nothing_can_be_told() -> None:
    own, known = some_routes()
    same = torch.tensor([3, 5]).expand(own.shape)
    check(same.roll(1, 1), same, known)


def test_the_order_of_a_token_s_experts_means_nothing() -> None:
    own, known = some_routes()
    check(own.flip(-1), own, known)


def test_routes_of_older_weights_than_sampled_the_row_are_refused() -> None:
    batch = make_batch()
    routes, _ = some_routes(*batch.tokens.shape)
    versions = torch.where(batch.loss_mask, 4, -1)
    extras = {
        ROUTES: routes,
        ROUTED: batch.lengths,
        ROUTES_VERSION: torch.tensor([4, -1, 5, 4, 4, 4]),
    }
    check_routes(batch.replace(versions=versions, extras=extras), (3, 2), EXPERTS)
    old = {**extras, ROUTES_VERSION: torch.tensor([4, 4, 3, 4, 4, 4])}
    with pytest.raises(
        DataError,
        match="row 2: its routes are of weight version 3, though version 4 or later sampled it",
    ):
        check_routes(batch.replace(versions=versions, extras=old), (3, 2), EXPERTS)


class FreeRouters:
    """A trainer that routes tokens itself, as `own` says, by the numbers of the rows in `attempt`."""

    routing = Routing("rollout", EXPERTS)

    def __init__(self, own: Tensor) -> None:
        self.own = own

    def score(self, batch: Batch, want: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        scores = {"logprobs": torch.zeros(batch.tokens.shape)}
        if ROUTES in want:
            scores[ROUTES] = self.own[batch.attempt, : batch.tokens.shape[1]]
        return scores


def sampled_batch(routes: Tensor, versions: Sequence[int]) -> Batch:
    """Rows of the run's own rollout, sampled and routed by these versions."""
    rows, width = routes.shape[:2]
    mask = torch.arange(width).expand(rows, width) > 2
    sampled_by = torch.tensor(versions)
    return make_batch(rows, width).replace(
        lengths=torch.full((rows,), width),
        loss_mask=mask,
        weights=mask / mask.sum(),
        versions=torch.where(mask, sampled_by[:, None], -1),
        source=torch.zeros(rows, dtype=torch.int64),
        attempt=torch.arange(rows),
        logprobs_known=torch.ones(rows, dtype=torch.bool),
        extras={
            ROUTES: routes,
            ROUTED: torch.full((rows,), width - 1),
            ROUTES_VERSION: sampled_by,
        },
    )


def test_routes_of_older_weights_are_not_judged_by_the_trainer_s_router() -> None:
    """Version 4 trains: rows of version 3 went anywhere; among them one of version 4 is judged."""
    own, _ = some_routes(rows=6)
    old, _ = some_routes(rows=6, seed=9)
    trainer: Any = FreeRouters(own)
    healthy = routing_metrics(sampled_batch(old, [3] * 6), trainer, 4)
    assert healthy["train/routes_differ"] > 0.5
    mixed = torch.cat([old[:5], own[5:]])
    assert routing_metrics(sampled_batch(mixed, [3] * 5 + [4]), trainer, 4)[
        "train/routes_differ"
    ] == pytest.approx(0)
    with pytest.raises(DataError, match="expected 50% or more"):
        routing_metrics(sampled_batch(old, [3] * 5 + [4]), trainer, 4)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda routes: routes.roll(1, 1), "shifted by one token"),
        (lambda routes: routes.roll(1, 2), "Layer 0 has those of another layer, 2"),
    ],
)
def test_stale_routes_of_other_tokens_or_layers_are_still_refused(fault: Any, words: str) -> None:
    own, _ = some_routes(rows=6)
    with pytest.raises(DataError, match=words):
        routing_metrics(sampled_batch(rounded(fault(own), 0.3), [3] * 6), FreeRouters(own), 4)  # type: ignore[arg-type]


def zeroed(routes: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(routes[:5]), routes[5:]])


def doubled(routes: Tensor) -> Tensor:
    changed = routes.clone()
    changed[30, 2, 1] = changed[30, 2, 0]
    return changed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (zeroed, "row 7, token 0: its routes name an expert twice"),
        (doubled, "row 7, token 30: its routes name an expert twice"),
        (lambda routes: routes + EXPERTS * (routes == 3), "expected routes of 0 to 7"),
        (lambda routes: routes - EXPERTS * (routes == 3), "expected routes of 0 to 7"),
    ],
    ids=["zeros", "one token", "too high", "negative"],
)
def test_impossible_routes_of_a_single_row_are_found_in_every_step(fault: Any, words: str) -> None:
    """Whichever rows the step draws."""
    own, _ = some_routes(rows=32)
    given = own.clone()
    given[7] = fault(given[7])
    for step in range(12):
        with pytest.raises(DataError, match=words):
            routing_metrics(sampled_batch(given, [step] * 32), FreeRouters(own), step)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [8, 13], ids=["first of its group", "another"])
@pytest.mark.parametrize(
    "fault",
    [lambda routes: routes.roll(1, 0), lambda routes: routes.roll(1, 1), lambda routes: routes[15]],
    ids=["shifted", "layers", "another token's"],
)
def test_a_single_row_that_routes_its_prompt_as_no_sibling_does_is_found_in_every_step(
    fault: Any, wrong: int
) -> None:
    """Eight groups of eight attempts; each has its prompt of 16 tokens in common."""
    own, _ = some_routes(rows=64)
    group = torch.arange(64) // 8
    own[:, :16] = own[group * 8, :16]
    given = own.clone()
    given[wrong] = fault(given[wrong])
    batch = sampled_batch(given, [4] * 64)
    tokens = batch.tokens.clone()
    tokens[:, :16] = tokens[group * 8, :16]
    for step in range(12):
        batch = sampled_batch(given, [step] * 64).replace(tokens=tokens, group=group)
        with pytest.raises(DataError, match=f"row {wrong}|layer"):
            routing_metrics(batch, FreeRouters(own), step)  # type: ignore[arg-type]
    healthy = batch.replace(extras={ROUTES: rounded(own, 0.1)})
    assert routing_metrics(healthy, FreeRouters(own), 11)["train/routes_differ"] < 0.2  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8])
def test_an_expert_that_is_named_twice_is_found_wherever_it_stands(most: int) -> None:
    distinct = torch.arange(most).expand(3, 2, most).clone()
    _check_distinct(distinct, 0)
    for first, second in itertools.combinations(range(most), 2):
        routes = distinct.clone()
        routes[1, 1, second] = routes[1, 1, first]
        with pytest.raises(DataError, match="row 4, token 1"):
            _check_distinct(routes, 4)


def test_load_and_spread_by_hand() -> None:
    even = torch.arange(8).view(1, 4, 1, 2)
    known = torch.ones(1, 4, dtype=torch.bool)
    assert _loads(even, known, 8) == pytest.approx(
        {"train/expert_load_max": 1.0, "train/expert_spread": 1.0}
    )
    collapsed = torch.tensor([2, 6]).expand(1, 4, 1, 2)
    found = _loads(torch.cat([even, collapsed], 2), known, 8)
    assert found == pytest.approx(
        {"train/expert_load_max": 4.0, "train/expert_spread": 0.0}, abs=1e-6
    )
    uneven = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]]).view(
        1, 4, 1, 2
    )  # shares 1/2, 1/4, 1/8, 1/8
    used = math.exp(1.75 * math.log(2))
    assert _loads(uneven, known, 8)["train/expert_spread"] == pytest.approx((used - 2) / 6)


def test_a_dense_policy_has_no_metrics_of_routers() -> None:
    class Dense:
        routing = None

    assert routing_metrics(make_batch(), Dense(), 0) == {}  # type: ignore[arg-type]
