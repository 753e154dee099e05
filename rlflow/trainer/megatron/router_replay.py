"""Router replay: tokens go to the experts that they went to when they were sampled, or scored.

Engine and trainer round differently, and a router that is nearly undecided then sends a token
elsewhere: its log-prob is another model's (Ma et al. 2025, arXiv 2510.11370). The weights of the
chosen experts are the trainer's own, and get gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES
from rlflow.errors import ConfigError, RLFlowError
from rlflow.models.architecture import Architecture
from rlflow.trainer import routing
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.packing import Feed
from rlflow.trainer.megatron.world import World
from rlflow.trainer.options import Routing
from rlflow.types import Batch


def routing_of(asked: str, model: Architecture) -> Routing | None:
    """What a policy does that has experts. Raises ConfigError for another one that is to replay."""
    if asked != "off" and model.experts is None:
        raise ConfigError("trainer.router_replay: the model has no experts; set it to off.")
    return None if model.experts is None else Routing(asked, model.experts.count)


def check_routes(batch: Batch, model: Architecture) -> None:
    """Raises DataError as `routing.check_routes`, for routes that are not the model's."""
    experts = model.experts
    assert experts is not None, "refused when the trainer was made"
    routing.check_routes(batch, (sum(experts.sparse), experts.top_k), experts.count)


class ExpertChoice(Protocol):
    """Who chooses the experts of tokens in the passes over a batch."""

    def begin(self, chunk: GPTModel, batch: Batch, feed: Feed) -> None:
        """Before the chunk's forward pass over a micro-batch."""

    def end(self, chunk: GPTModel, rows: list[int], feed: Feed) -> None:
        """After it; rows: of the whole batch."""

    def finish(self, chunks: Sequence[GPTModel], microbatches: int) -> None:
        """After the last backward pass."""


class Replaying:
    """The batch names the experts."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, chunk: GPTModel, batch: Batch, feed: Feed) -> None:
        """Tells the routers where the tokens go."""
        routes = _of_rank(batch, feed, self._world)
        for place, router in _routers(chunk):
            router.set_target_indices(routes[:, place])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def end(self, chunk: GPTModel, rows: list[int], feed: Feed) -> None:
        """What is computed again goes where it went, in the same order."""
        for _, router in _routers(chunk):
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def finish(self, chunks: Sequence[GPTModel], microbatches: int) -> None:
        """Lets the routers choose again. Raises RLFlowError where the backward passes took the
        routes of some micro-batches again and not of others: those of one went to another."""
        left = {
            len(router.replay_backward_list) for chunk in chunks for _, router in _routers(chunk)
        }
        forget(chunks)
        if not left <= {0, microbatches}:
            raise RLFlowError(
                f"router replay: of {microbatches} micro-batches the routes of {sorted(left)} were "
                "left after the backward pass; expected none of them, or all."
            )


class Recording:
    """The routers choose, and what they chose is kept.

    routes: (B, T, layers, k) of the whole batch, once finished, the same on all ranks."""

    def __init__(self, world: World, model: Architecture, batch: Batch) -> None:
        experts = model.experts
        if experts is None:
            raise ConfigError("trainer.score: the model has no experts, and so no routes.")
        kind = torch.uint8 if experts.count <= 256 else torch.int32
        shape = (*batch.tokens.shape, sum(experts.sparse), experts.top_k)
        self._world, self.routes = world, torch.zeros(shape, dtype=kind, device=device())

    def begin(self, chunk: GPTModel, batch: Batch, feed: Feed) -> None:
        """Tells the routers to keep what they choose."""
        for _, router in _routers(chunk):
            router.set_router_replay_action(RouterReplayAction.RECORD)

    def end(self, chunk: GPTModel, rows: list[int], feed: Feed) -> None:
        """Takes what they chose for the rank's tokens."""
        here = feed.places >= 0
        for place, router in _routers(chunk):
            chosen = router.get_recorded_indices().to(self.routes.dtype)
            if self._world.layout.sequence_parallel:
                parts = [torch.empty_like(chosen) for _ in range(self._world.tensor_parallel)]
                dist.all_gather(parts, chosen.contiguous(), group=self._world.tensor_group)
                chosen = torch.cat(parts)
            if rows:
                found = chosen[feed.places.clamp(min=0)] * here[..., None]
                self.routes[rows, : found.shape[1], place] = found

    def finish(self, chunks: Sequence[GPTModel], microbatches: int) -> None:
        """Puts together what context-parallel ranks, stages and data-parallel ranks have."""
        forget(chunks)
        world = self._world
        for group in (world.context_group, world.pipeline_group, world.data_group):
            if group.size() > 1:
                dist.all_reduce(self.routes, group=group)


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
    """What replays, of each of `routers`."""
    return ((place, router.router_replay) for place, router in routers(chunk))


def routers(chunk: GPTModel) -> Iterator[tuple[int, TopKRouter]]:
    """(which of the model's layers with experts, its router) of the chunk's."""
    frequency = chunk.config.moe_layer_freq
    for layer in chunk.decoder.layers:
        if layer.is_moe_layer:
            before = layer.layer_number - 1
            place = before if frequency == 1 else sum(frequency[:before])
            yield place, layer.mlp.router
