"""An even load of experts: losses of the routers, and biases that move.

Of an update's tokens, without padding, in a layer of E experts, where f_i is the share of the
tokens that go to expert i (k in all) and p its router's scores, which add up to 1:

    aux_loss  E * sum_i f_i * mean(p_i), transformers' `load_balancing_loss_func` of the layer, k at
              an even load (Fedus et al. 2021, arXiv 2101.03961, section 2.2, is that over k)
    z_loss    mean(logsumexp(logits)^2) (Zoph et al. 2022, arXiv 2202.08906, section 3.2)

Each is the mean over layers with experts. f is of the whole update (arXiv 2501.11873), and known
before its first gradient: every token then adds a term of its own, and the gradient does not depend
on how tokens are split. Megatron's losses are of one micro-batch each (0.16: too small over several
tensor- or context-parallel ranks), and not a number of one that is padding alone.

A bias moves by `bias_rate` up where an expert gets fewer tokens than the mean, and down where more
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2), if the weights moved: Megatron's moves before the
norm of the gradient is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES
from rlflow.models.architecture import Architecture
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.layers import BalancedRouter
from rlflow.trainer.megatron.router_replay import ExpertChoice, Recording, routers
from rlflow.trainer.megatron.step import Microbatch, route
from rlflow.trainer.megatron.world import World
from rlflow.trainer.options import BalanceOptions
from rlflow.trainer.routing import count
from rlflow.types import Batch


class Balancing:
    """Of one update over a batch. Every method is a collective."""

    def __init__(
        self,
        asked: BalanceOptions,
        world: World,
        model: Architecture,
        chunks: Sequence[GPTModel],
        batch: Batch,
    ) -> None:
        assert model.experts is not None
        self._asked = asked
        self._experts = model.experts
        self._chunks = chunks
        self._batch = batch
        self._lengths = batch.lengths
        self._record = partial(Recording, world, model, batch)
        self._recording: Recording | None = None

    def begin(
        self,
        microbatches: Sequence[Microbatch],
        routing: ExpertChoice | None,
    ) -> ExpertChoice | None:
        """Tells the routers what they add to the loss of the micro-batches. Returns who chooses the
        experts in them. Where the loads must be known before, makes a pass in which nothing is
        learned."""
        replayed = routing is not None
        if replayed:  # only tokens with routes count
            self._lengths = self._batch.extras[ROUTED]
        elif self._asked.aux_loss:
            self._recording = self._record()
            for chunk in self._chunks:
                chunk.eval()
            route(self._chunks, microbatches, self._recording)
            for chunk in self._chunks:
                chunk.train()
        elif self._asked.bias_rate:
            routing = self._recording = self._record()
        for microbatch in microbatches:
            microbatch.padding = _padding(microbatch, replayed)
        if self._asked.aux_loss or self._asked.z_loss:
            self._set_losses()
        return routing

    def finish(self, moved: bool) -> dict[str, float]:
        """The losses without their coefficients. moved: so do the biases then."""
        if self._asked.bias_rate and moved:
            self._move_biases()
        sums = torch.zeros(2, dtype=torch.float64, device=device())
        for _, router in self._routers():
            if router.loads is not None:
                sums += router.sums
                router.loads = None
        dist.all_reduce(sums)
        aux_loss, z_loss = (sums / (self._tokens() * self._layers())).tolist()
        metrics = {}
        if self._asked.aux_loss:
            metrics["router_aux_loss"] = aux_loss
        if self._asked.z_loss:
            metrics["router_z_loss"] = z_loss
        return metrics

    def _set_losses(self) -> None:
        """The gradients are divided by all tokens of the batch in the end."""
        each = float(self._batch.lengths.sum()) / (self._tokens() * self._layers())
        if self._asked.aux_loss:
            loads = self._counts() * (self._experts.count / self._tokens())
        else:
            loads = torch.zeros(self._layers(), self._experts.count)
        for place, router in self._routers():
            router.loads = loads[place].to(device(), torch.float32)
            router.factors = (each * self._asked.aux_loss, each * self._asked.z_loss)
            router.sums = torch.zeros(2, dtype=torch.float64, device=device())

    def _move_biases(self) -> None:
        counts = self._counts()
        # Whole numbers: an even load is exactly even
        lacking = counts.sum(1, keepdim=True) - counts * self._experts.count
        for place, router in self._routers():
            direction = lacking[place].sign().to(router.expert_bias)
            router.expert_bias += self._asked.bias_rate * direction

    def _counts(self) -> Tensor:
        """(layers, experts): tokens of the update that go to each."""
        if self._recording is None:
            chosen = self._batch.extras[ROUTES]
        else:
            chosen = self._recording.routes.cpu()
        known = torch.arange(chosen.shape[1]) < self._lengths[:, None]
        return count(chosen, known, self._experts.count)

    def _layers(self) -> int:
        return sum(self._experts.sparse)

    def _tokens(self) -> int:
        return max(1, int(self._lengths.sum()))

    def _routers(self) -> Iterator[tuple[int, BalancedRouter]]:
        for chunk in self._chunks:
            yield from routers(chunk)


def _padding(microbatch: Microbatch, replayed: bool) -> Tensor:
    """(rows, tokens) bool of the feed: what is no token of the update that counts."""
    feed, batch = microbatch.feed, microbatch.batch
    counted = batch.extras[ROUTED] if replayed else batch.lengths
    padding = torch.ones(feed.tokens.numel(), dtype=torch.bool, device=feed.tokens.device)
    if microbatch.rows:
        here = torch.arange(feed.places.shape[1], device=padding.device) < counted[:, None]
        padding[feed.places[here & (feed.places >= 0)]] = False
    rows = feed.tokens.shape[0]
    return padding.view(-1, rows).t().contiguous()
