"""The rollout of a run whose episodes are played by workers in other processes:
`cluster.rollout_workers`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.session import LOOPBACK
from rlflow.cluster.slots import PoolLimits
from rlflow.cluster.workers import RayWorkers
from rlflow.codec import from_bytes
from rlflow.components import WEIGHT_TRANSFER
from rlflow.config.schema import RunConfig
from rlflow.environment import Environment
from rlflow.http import own_address
from rlflow.matmul import PRODUCTS, Library
from rlflow.report.reductions import reduced
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.engine import PauseMode
from rlflow.rollout.players import Player, RemotePlayer
from rlflow.rollout.transfer.base import Publisher
from rlflow.rollout.workers import Update
from rlflow.run.assemble import make_environment, make_rollout, rollout_options
from rlflow.run.worker import RolloutWorker
from rlflow.types import Trajectory

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""By which a worker that is looked at has answered; rollout.faults.call_s, by which a call counts
as hung, where that is less."""

PROBE_S = 120.0
"""How long training waits at most for workers to take over weights and answer the probe: while it
trains nobody is compared."""


class WorkerRollout(Rollout):
    """A Rollout without an engine of its own: the workers of a pool play the attempts, and read the
    weights that it publishes. Its environment tells tasks and metrics; those of the workers play.
    close: ends the workers."""

    def __init__(
        self,
        pool: WorkerPool,
        publisher: Publisher,
        environment: Environment,
        tokenizer: Tokenizer,
        close: Callable[[], object],
        **options: Any,
    ) -> None:
        held = pool.first_facts().max_tokens
        if held is not None:
            options["max_total_tokens"] = min(held, options["max_total_tokens"])
        super().__init__([], environment, tokenizer, **options)
        self.pool = pool
        self._publisher = publisher
        self._close = close
        self._mode: PauseMode = "keep"

    def player(self, wake: Callable[[], object] = lambda: None) -> Player:
        """Plays attempts on the workers. Where the run is deterministic one worker plays all that
        start at once: their batches are the same then, whatever number of workers there are."""
        player = RemotePlayer(self.pool, together=self.deterministic)
        self._players.add(player)
        return player

    def pause(self, mode: PauseMode) -> None:
        """Workers go on while the trainer works; each pauses for itself, in this mode, when it
        takes over new weights."""
        self._mode = mode

    def resume(self) -> None:
        """Of no effect: see `pause`."""

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, probe: WeightProbe | None = None
    ) -> None:
        """Publishes the weights: each worker reads and verifies them before it gets its next
        attempt. Returns at once, but with a probe: the trainer scores here, in this thread, what
        the workers' engines answer. Who takes longer than PROBE_S, or joins later, passes while
        attempts are waited for, when the trainer still has the same weights.

        Raises RolloutError where no worker samples from what was sent."""
        self._publisher.publish(weights, version)
        self.version = version
        questions = None if probe is None else probe.questions
        self.pool.update(
            Update(version, self._publisher.address, self._mode, self._publisher.key, questions),
            probe,
        )
        if probe is not None:
            self.pool.await_passed(PROBE_S)

    @property
    def hashes_weights(self) -> bool:
        return self.pool.first_facts().hashes_weights

    def take_report(self) -> None:
        """Makes `report` what all workers' environments say about the time since the last call, and
        how the workers fared."""
        self.report = reduced(self.pool.reports(), self.environment.metrics) | self.pool.counts()

    def close(self) -> None:
        """Ends the workers; the driver's own environment is shut down too."""
        try:
            super().close()
        finally:
            try:
                self._close()
            finally:
                self._publisher.close()


def make_run_rollout(config: RunConfig) -> Rollout:
    """The rollout of a run: in this process, or of `cluster.rollout_workers` others. The caller
    closes it."""
    return make_worker_rollout(config) if config.cluster.rollout_workers else make_rollout(config)


def make_worker_rollout(config: RunConfig) -> WorkerRollout:
    """The rollout of a configuration over `cluster.rollout_workers` workers; the caller closes
    it."""
    if config.run.deterministic:
        PRODUCTS.fix()
    section, faults = config.cluster, config.rollout.faults
    host = own_address(section.address) if section.address else LOOPBACK
    here = {} if host == LOOPBACK else {"host": host}  # else everybody is on this machine
    environment = make_environment(config, **({"network_host": host} if here else {}))
    tokenizer = Tokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    publisher: Publisher = WEIGHT_TRANSFER.build(
        section.weight_transfer, "cluster.weight_transfer", **here
    )
    try:
        workers = RayWorkers(
            partial(
                make_worker,
                replace(config, environment={**config.environment, **environment.worker_options()}),
            ),
            section.rollout_workers,
            read=_read,
            limits=PoolLimits(
                answer_s=min(ANSWER_S, faults.call_s), attempt_s=faults.episode_s + faults.call_s
            ),
            address=section.address,
            threads=section.threads_per_rank,
            gpus=section.gpus_per_rank,
            services=section.services,
            cpus=(section.rollout_workers + section.ranks) * section.threads_per_rank,
        )
    except BaseException:
        publisher.close()
        raise
    try:
        return WorkerRollout(
            workers.pool,
            publisher,
            environment,
            tokenizer,
            workers.close,
            **rollout_options(config),
        )
    except BaseException:
        workers.close()
        publisher.close()
        raise


def make_worker(
    config: RunConfig, name: str, threads: int, products: Mapping[str, Library]
) -> RolloutWorker:
    """What lives in a worker's process."""
    return RolloutWorker(name, config, threads, products)


def _read(payload: np.ndarray[Any, Any]) -> Trajectory:
    (trajectory,) = from_bytes(payload.tobytes(), "an attempt from a rollout worker")
    return trajectory
