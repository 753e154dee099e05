"""Router replay: tokens go to the experts that they went to when they were sampled.

Engine and trainer round differently, and a router that is nearly undecided then sends a token
elsewhere: its log-prob is another model's (Ma et al. 2025, arXiv 2510.11370). The weights of the chosen
experts are the trainer's own, and get gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES
from rlflow.errors import ConfigError, DataError
from rlflow.models.architecture import Architecture
from rlflow.trainer.megatron.packing import Feed
from rlflow.trainer.megatron.world import World
from rlflow.types import Batch


def check_model(asked: str, model: Architecture) -> None:
    """Raises ConfigError for a model without routers."""
    if asked != "off" and model.experts is None:
        raise ConfigError("trainer.router_replay: the model has no experts; set it to off.")


def check_routes(batch: Batch, model: Architecture) -> None:
    """Raises DataError unless all tokens that a trained one depends on have routes of the model's
    shape."""
    if ROUTES not in batch.extras:
        raise DataError(
            "batch: expected the experts of its tokens for trainer.router_replay=rollout, found none; "
            "sample with an engine that says them (rollout.engine.name=embedded)."
        )
    experts = model.experts
    assert experts is not None, "refused when the trainer was made"
    routes, routed = batch.extras[ROUTES], batch.extras[ROUTED]
    shape = (sum(experts.sparse), experts.top_k)
    if tuple(routes.shape[2:]) != shape:
        raise DataError(
            f"batch: expected routes of (layers, experts of a token) {shape}, found "
            f"{tuple(routes.shape[2:])}; was another model sampled?"
        )
    last = (batch.trained * torch.arange(batch.tokens.shape[1])).amax(1)
    for row in (routed < last).nonzero().flatten().tolist():
        raise DataError(
            f"batch: row {row}: expected routes of {int(last[row])} tokens, which come before its "
            f"last trained one, found {int(routed[row])}."
        )
    if int(routes.min()) < 0 or int(routes.max()) >= experts.count:
        raise DataError(f"batch: expected routes of 0 to {experts.count - 1}.")


def begin(chunk: GPTModel, batch: Batch, feed: Feed, world: World) -> None:
    """Tells the chunk's routers where the tokens of its next forward pass go."""
    routes = _of_rank(batch, feed, world)
    for place, router in _routers(chunk):
        router.set_target_indices(routes[:, place])
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def end(chunk: GPTModel) -> None:
    """After the forward pass: what is computed again goes where it went, in the same order."""
    for _, router in _routers(chunk):
        router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def forget(chunks: Sequence[GPTModel]) -> None:
    """Lets the routers choose again."""
    for chunk in chunks:
        for _, router in _routers(chunk):
            router.clear_indices()
            router.clear_router_replay_action()


def _of_rank(batch: Batch, feed: Feed, world: World) -> Tensor:
    """(this rank's tokens, layers, k). Tokens without routes, on which nothing depends, go to the
    first experts."""
    routes, routed = batch.extras[ROUTES], batch.extras[ROUTED]
    layers, most = routes.shape[2:]
    anywhere = torch.arange(most, device=feed.tokens.device)
    told = anywhere.expand(feed.tokens.numel(), layers, most).clone()
    known = torch.arange(feed.places.shape[1], device=told.device) < routed[:, None]
    known &= feed.places >= 0
    told[feed.places[known]] = routes[known].long()
    if world.layout.sequence_parallel:
        return told.chunk(world.tensor_parallel)[world.tensor_rank]
    return told


def _routers(chunk: GPTModel) -> Iterator[tuple[int, RouterReplay]]:
    """(which of the model's layers with experts, its router's) of the chunk's."""
    frequency = chunk.config.moe_layer_freq
    for layer in chunk.decoder.layers:
        if layer.is_moe_layer:
            before = layer.layer_number - 1
            place = before if frequency == 1 else sum(frequency[:before])
            yield place, layer.mlp.router.router_replay
