"""The experts of a batch's tokens, as a training step sees them: whether what an engine named can
be believed, how evenly routers use their experts, and what is done for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES, ROUTES_VERSION
from rlflow.errors import ConfigError, DataError
from rlflow.models.architecture import Architecture
from rlflow.models.entries import router_aux_loss
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import BalanceOptions, TrainerOptions
from rlflow.types import SOURCES, Batch

SAMPLE = 4
"""Rows of each step whose experts the trainer chooses anew."""
LEAST = 0.5
"""Of the choices of a row or of a layer that must be the trainer's own, beyond those that any other
token's would be. Rounding changes some hundredths, in large models up to a tenth (arXiv 2510.11370,
section 3)."""
CHOICES = 64
"""Of a row or layer, below which it is not judged by itself."""
CLEARLY = 0.25
"""By how much more routes must agree with other tokens or another layer to be theirs."""
UNEXPLAINED = "They may be of older weights, of another model, or of other tokens."
DOUBTFUL, COMPARED = 0.2, 256
"""Share of the choices that two attempts must make differently in what they have in common, of so
many tokens, for the trainer to look at both; rounding explains a tenth."""
NEWEST = torch.iinfo(torch.int64).max
ALIKE = 0.05
"""Where any token's experts agree with any other's but for this share, nothing can be told."""


def balance_of(
    options: TrainerOptions, config: Mapping[str, Any], model: Architecture
) -> BalanceOptions | None:
    """What is done for an even load of the experts, of a model that has some: what the options say,
    else config.json. Raises ConfigError for what the model cannot do."""
    asked = options.balance
    if model.experts is None:
        if asked is not None:
            raise ConfigError("trainer.balance: the model has no experts; set it to none.")
        return None
    if asked is None:
        asked = BalanceOptions(aux_loss=router_aux_loss(config))
    if asked.bias_rate and (model.routing is None or not model.routing.sigmoid):
        raise ConfigError(
            f"trainer.balance.bias_rate: routers of model family '{model.family}' have no bias; "
            "set it to 0."
        )
    if asked.bias_rate and options.lora is not None:
        raise ConfigError(
            "trainer.balance.bias_rate: with trainer.lora the routers stay as they are; set it to "
            "0."
        )
    return asked if asked != BalanceOptions() else None


def check_routes(batch: Batch, shape: tuple[int, int], experts: int) -> None:
    """Raises DataError unless all tokens that a trained one depends on have routes of this shape
    (layers, k) to different ones of so many experts, of no older weights than sampled the row."""
    if ROUTES not in batch.extras:
        raise DataError(
            "batch: expected the experts of its tokens for trainer.router_replay, found none; "
            "sample with an engine that says them (rollout), or take those of trainer.score "
            "(recompute)."
        )
    routes, routed = batch.extras[ROUTES], batch.extras[ROUTED]
    last = (batch.trained * torch.arange(batch.tokens.shape[1])).amax(1)
    for row in (routed < last).nonzero().flatten().tolist():
        raise DataError(
            f"batch: row {row}: expected routes of {int(last[row])} tokens, which come before its "
            f"last trained one, found {int(routed[row])}: an engine that leaves out those of a "
            "cached prefix says too few."
        )
    version = batch.extras.get(ROUTES_VERSION)
    if version is not None and batch.versions is not None:
        oldest = _oldest_sampled(batch.versions)
        older = (version >= 0) & (version < oldest) & (batch.versions >= 0).any(1)
        for row in older.nonzero().flatten().tolist():
            raise DataError(
                f"batch: row {row}: its routes are of weight version {int(version[row])}, though "
                f"version {int(oldest[row])} or later sampled it: what the engine keeps of a "
                "prefix outlived its weights."
            )
    if tuple(routes.shape[2:]) != shape:
        raise DataError(
            f"batch: expected routes of (layers, experts of a token) {shape}, found "
            f"{tuple(routes.shape[2:])}; was another model sampled?"
        )
    if int(routes.min()) < 0 or int(routes.max()) >= experts:
        raise DataError(f"batch: expected routes of 0 to {experts - 1}.")
    for row, count in enumerate(routed.tolist()):  # one at a time: all together take memory
        _check_distinct(routes[row, :count], row)


def _check_distinct(routes: Tensor, row: int) -> None:
    """Raises DataError where one of a row's tokens goes to an expert twice. routes: (N, layers,
    k)."""
    most = routes.shape[-1]
    for step in range(1, most // 2 + 1):  # each pair of places is some steps apart on the circle
        twice = (routes == routes.roll(step, -1)).any(-1).any(-1)
        if bool(twice.any()):
            raise DataError(
                f"batch: row {row}, token {int(twice.nonzero()[0])}: its routes name an expert "
                "twice, as zeros do that stand for routes which an engine has not."
            )


def routing_metrics(batch: Batch, trainer: Trainer, step: int) -> dict[str, float]:
    """`train/` metrics of a step's routers, before its first update; none of a dense policy's.
    step: the version of the trainer's weights too.

    The trainer routes a few rows anew (SAMPLE, others in each step), for what is not known without;
    with routes of the rollout once more as they say. Raises DataError where those are not the
    routes of their tokens."""
    routing = trainer.routing
    if routing is None:
        return {}
    if routing.replay == "recompute":
        return _loads(batch.extras[ROUTES], _first(batch, batch.lengths), routing.experts)
    rows, current = _sample(batch, step)
    if not len(rows):
        return {}
    part = batch.replace(wanted=batch.trained).select(rows)
    free = trainer.score(part, want=("logprobs", ROUTES))
    if routing.replay == "off":
        return _loads(free[ROUTES], _first(part, part.lengths), routing.experts)
    own = free[ROUTES].long()
    check_routes(batch, (own.shape[2], own.shape[3]), routing.experts)  # every row
    metrics = _loads(batch.extras[ROUTES], _first(batch, batch.extras[ROUTED]), routing.experts)
    known, given = _first(part, part.extras[ROUTED]), part.extras[ROUTES].long()
    differ = 1 - float(_same(given, own)[known].mean())
    check_agreement(given, own, known, routing.experts, rows.tolist(), current)
    sampled = part.loss_mask & part.require("logprobs_known", "routing_metrics")[:, None]
    fixed = trainer.score(part)["logprobs"]
    for name, found in (("free", free["logprobs"]), ("replayed", fixed)):
        if bool(sampled.any()):
            gap = (found - part.logprobs)[sampled].abs().mean()
            metrics[f"train/logprob_gap_{name}"] = float(gap)
    return {**metrics, "train/routes_differ": differ}


def check_agreement(
    given: Tensor,
    own: Tensor,
    known: Tensor,
    experts: int,
    rows: list[int],
    current: bool = True,
) -> None:
    """Raises DataError where the routes that an engine named (B, T, layers, k) are not those of the
    tokens, with what they seem to be; own: what the trainer chooses; known (B, T): which have some.

    A legitimate route cannot be told from another one by itself, but many can: the share of equal
    choices, less what two tokens of the layer agree by chance, over what they could agree beyond it
    (Cohen's kappa), must be LEAST in each row and layer. Not so those of older weights than the
    trainer's (not `current`), which may choose anything: they are refused where they are plainly
    those of other tokens or layers. rows: numbers of the rows."""
    load, same = _load(own, known, experts), _same(given, own)
    by_row, by_layer = (_kappa(same, given, known, load, dim) for dim in (0, 2))
    lowest = min(float(by_row.min()), float(by_layer.min()))
    if lowest >= LEAST:
        return
    seeming = _seeming(given, own, known, load, by_layer)
    if not current and not seeming:
        return
    where = (
        f"row {rows[int(by_row.argmin())]}"
        if float(by_row.min()) == lowest
        else f"layer {int(by_layer.argmin())} of those with experts"
    )
    raise DataError(
        f"batch: {where}: {lowest:.0%} of the experts that the engine named are the trainer's own "
        f"choice, beyond chance; expected {LEAST:.0%} or more. {seeming or UNEXPLAINED} Replayed, "
        "they would train another model; mend the engine, or set trainer.router_replay=recompute."
    )


def _kappa(
    same: Tensor, given: Tensor, known: Tensor, load: Tensor, dim: int | None = None
) -> Tensor:
    """Of each row (0) or layer (2), 1 where nothing can be told; or of all together, 0 there.

    same: as of `_same`; given (B, T, layers, k): one of the two choices, in its tokens `known`
    (B, T); load (layers, experts): the other's."""
    chance = load[torch.arange(given.shape[2])[:, None], given].mean(-1)
    counted = known[..., None].expand(chance.shape)
    others = tuple(one for one in range(3) if one != dim)
    count, possible = counted.sum(others), ((1 - chance) * counted).sum(others)
    found = ((same - chance) * counted).sum(others) / possible.clamp(min=1e-9)
    told = (count * given.shape[3] >= CHOICES) & (possible >= ALIKE * count)
    return torch.where(told, found, 0.0 if dim is None else 1.0)


def _seeming(given: Tensor, own: Tensor, known: Tensor, load: Tensor, by_layer: Tensor) -> str:
    """What wrong routes are, in a sentence; empty where they agree with nothing else either, by
    CLEARLY more than with their own places."""
    both = known[:, 1:] & known[:, :-1]
    in_place = float(_kappa(_same(given, own), given, known, load))
    for ahead, first, second in (
        ("before", given[:, 1:], own[:, :-1]),
        ("behind", given[:, :-1], own[:, 1:]),
    ):
        shifted = float(_kappa(_same(first, second), first, both, load))
        if shifted >= max(LEAST, in_place + CLEARLY):
            return f"They are shifted by one token: each has those of the token {ahead} it."
    for layer in (by_layer < LEAST).nonzero().flatten().tolist():
        for other in range(own.shape[2]):
            first, second = given[:, :, layer, None], own[:, :, other, None]
            exchanged = float(_kappa(_same(first, second), first, known, load[other, None]))
            if other != layer and exchanged >= max(LEAST, float(by_layer[layer]) + CLEARLY):
                return f"Layer {layer} has those of another layer, {other}."
    return ""


def _same(given: Tensor, own: Tensor) -> Tensor:
    """(..., layers): the share of a token's experts that are in both."""
    return (given[..., :, None] == own[..., None, :]).any(-1).float().mean(-1)


def _load(routes: Tensor, known: Tensor, experts: int) -> Tensor:
    """(layers, experts): the share of the tokens that go to each expert."""
    return count(routes, known, experts) / max(1, int(known.sum()))


def count(routes: Tensor, known: Tensor, experts: int) -> Tensor:
    """(layers, experts): how many of the tokens `known` (B, T) go to each expert."""
    flat = routes[known].long()
    return torch.stack([layer.flatten().bincount(minlength=experts) for layer in flat.unbind(1)])


def _loads(routes: Tensor, known: Tensor, experts: int) -> dict[str, float]:
    most = routes.shape[3]
    shares = _load(routes, known, experts).double() / most
    used = torch.special.entr(shares).sum(1).exp().min()
    possible = min(experts, most * int(known.sum()))
    spread = (used - most) / (possible - most) if possible > most else 1.0
    return {
        "train/expert_load_max": float(shares.max()) * experts,
        "train/expert_spread": float(spread),
    }


def _first(batch: Batch, counts: Tensor) -> Tensor:
    """(B, T) bool: so many first tokens of each row."""
    return torch.arange(batch.tokens.shape[1]) < counts[:, None]


def _sample(batch: Batch, version: int) -> tuple[Tensor, bool]:
    """(numbers of SAMPLE rows of the run's own rollout, whether the routes of all of them are of
    the weights of this version). Those of peers and earlier steps are left out, and those of older
    weights where there are others. Suspects come first, the others by lot."""
    own = batch.require("source", "routing_metrics") == SOURCES.index("local")
    current = own & (_oldest(batch) >= version)
    fresh = bool(current.any())
    rows = (current if fresh else own).nonzero().flatten()
    draw = torch.Generator().manual_seed(version)
    drawn = rows[torch.randperm(len(rows), generator=draw)].tolist()
    first = _suspects(batch, rows.tolist()) if fresh else []
    chosen = list(dict.fromkeys([*first, *drawn]))[:SAMPLE]
    return torch.tensor(sorted(chosen), dtype=torch.int64), fresh


def _suspects(batch: Batch, rows: Sequence[int]) -> list[int]:
    """Pairs of rows of a group that begin alike and go elsewhere there, though by the same weights:
    what the trainer routes anew shows which of them is wrong. A fault in few of many rows would be
    drawn by luck alone."""
    if ROUTES not in batch.extras or batch.group is None:
        return []
    routes, routed = batch.extras[ROUTES], batch.extras[ROUTED].tolist()
    leaders: dict[int, int] = {}
    suspects = []
    for row in rows:
        leader = leaders.setdefault(int(batch.group[row]), row)
        count = min(routed[row], routed[leader], COMPARED)
        alike = (batch.tokens[row, :count] == batch.tokens[leader, :count]).long().cumprod(0)
        begin = slice(int(alike.sum()))
        same = _same(routes[row, begin], routes[leader, begin])
        if same.numel() and float(same.mean()) < 1 - DOUBTFUL:
            suspects += [leader, row]
    return suspects


def _oldest(batch: Batch) -> Tensor:
    """(B,) int64: the oldest weights that chose a route of the row; those that sampled a token of
    it where the engine does not say; NEWEST where nothing is known."""
    oldest = torch.full((len(batch),), NEWEST)
    if batch.versions is not None:
        oldest = _oldest_sampled(batch.versions)
    version = batch.extras.get(ROUTES_VERSION)
    return oldest if version is None else torch.where(version >= 0, version, oldest)


def _oldest_sampled(versions: Tensor) -> Tensor:
    """(B,) the least of each row (B, T) that is a version; NEWEST where none is."""
    return versions.masked_fill(versions < 0, NEWEST).amin(1)
