"""The engines of a run between its steps: asleep while the trainer works, given its weights, started
again where they have ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from rlflow.errors import RolloutError
from rlflow.report.timer import GIB
from rlflow.rollout import Rollout, WeightProbe
from rlflow.rollout.engine import PauseMode, Sent
from rlflow.rollout.weight_sync import sharing_of
from rlflow.trainer.base import Trainer

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""Of engines, in a run or what is left of one that is resumed: what ends more often ends for a
reason."""


class EngineKeeper:
    """Keeps a run's engines in step with its trainer.

    probe: for engines that cannot hash their weights. on_update: what becomes of requests in flight
    when the weights change. overlap: the engines sample while the trainer works. adapters_alone:
    they get adapters, not weights. spacing: nats between log-probs, as both sides round them.
    merged_dtype: what adapters are merged in, for the engines; None: there are none, or they are
    not merged. restarts: how often engines were started again. lost: what ends the run once its
    step is counted."""

    def __init__(
        self,
        rollout: Rollout,
        trainer: Trainer,
        probe: WeightProbe | None,
        *,
        on_update: PauseMode,
        overlap: bool,
        adapters_alone: bool = False,
        spacing: float = 0.0,
        merged_dtype: torch.dtype | None = None,
    ) -> None:
        self.probe = probe
        self.restarts = 0
        self.lost: RolloutError | None = None
        self._rollout = rollout
        self._trainer = trainer
        self._on_update: PauseMode = on_update
        self._overlap = overlap
        self.adapters_alone = adapters_alone
        self.spacing = spacing
        # A backend without adapters need not know of it
        self._merged = () if merged_dtype is None else (merged_dtype,)
        self._freed_bytes = 0

    @property
    def may_end(self) -> bool:
        """Whether engines may end by themselves."""
        return any(engine.may_end for engine in self._rollout.engines)

    def rest(self, in_flight: bool) -> None:
        """Pauses the engines and lets them give memory back before the trainer works; of no effect
        where both work at a time. in_flight: they play attempts."""
        if not self._overlap:
            self.pause(in_flight)
            self._freed_bytes = self._rollout.sleep()

    def pause(self, in_flight: bool) -> None:
        """Stops engines that play, before the weights change at the latest."""
        if in_flight:
            self._rollout.pause(self._on_update)

    def sync(self, version: int, in_flight: bool) -> None:
        """Gives the engines the trainer's weights under that version, verified by content hash or
        by the probe. Engines that end for good are `lost`: first the step is counted, whose
        training is done. Raises RolloutError where engines that go on do not take them."""
        self.pause(in_flight)
        try:
            self.load(version)
        except RolloutError as error:
            if not self._rollout.failure:
                raise
            self.lost = error

    def load(self, version: int) -> None:
        """Gives the engines the trainer's weights, and starts those again that end or have ended.
        Raises RolloutError where that was done too often."""
        while True:
            if ended := self._rollout.failure:
                self._count_restart(ended)
            try:
                self._rollout.load_weights(self._weights(), version, self.probe)
            except RolloutError:
                if not self._rollout.failure:
                    raise
            else:
                break

    def _count_restart(self, ended: str) -> None:
        if self.restarts == MOST_RESTARTS:
            raise RolloutError(
                f"{ended} It was started again {MOST_RESTARTS} times before. --resume goes on."
            )
        self.restarts += 1
        logger.warning("%s Starting it again: %d of %d times", ended, self.restarts, MOST_RESTARTS)

    def _weights(self) -> Iterator[Sent]:
        if self.adapters_alone:
            return self._trainer.adapters()
        if self._rollout.recorded:  # ranks would begin to gather them at once
            return iter(())
        sharing = sharing_of(self._rollout.engines)
        if sharing is not None:
            return self._trainer.gpu_weights(sharing, *self._merged)
        return self._trainer.weights(self._rollout.weights_device, *self._merged)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step: restarts, what of merged adapters arrived, and memory that went to
        the trainer and back."""
        metrics = {}
        if self._merged and (arrived := self._trainer.adapters_arrived()) is not None:
            metrics["sync/adapters_arrived"] = arrived
        if self.may_end:
            metrics["rollout/engine_restarts"] = float(self.restarts)
        if not self._overlap and any(engine.sleeps for engine in self._rollout.engines):
            taken = self._rollout.memory_taken
            metrics["memory/engine_freed_gib"] = self._freed_bytes / GIB
            metrics["memory/engine_taken_gib"] = taken / GIB
        return metrics
