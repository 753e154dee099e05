"""Routes that are not those of their tokens are told from legitimate ones, and routers are described."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES, ROUTES_VERSION
from rlflow.errors import DataError
from rlflow.trainer.routing import _loads, check_agreement, check_routes, routing_metrics
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
        (torch.zeros_like, "row 10, token 0: its routes name an expert twice, as zeros do"),
    ],
    ids=["before", "behind", "layers", "two layers", "weights", "one row", "zeros"],
)
def test_other_routes_are_refused_by_what_they_are(fault: Any, words: str) -> None:
    own, known = some_routes()
    with pytest.raises(DataError, match=words) as raised:
        check(fault(own), rounded(own, 0.05), known)
    assert "set trainer.router_replay=recompute" in str(raised.value) or "twice" in words


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
