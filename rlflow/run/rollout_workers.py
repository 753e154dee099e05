"""Rollout workers: their own part, engine and environment in a process of its own; the driver's,
the rollout of a run whose episodes they play (`cluster.rollout_workers`).

The driver calls a worker's methods from afar; one thread plays, loads and cancels, another one is
looked at, so that it answers whatever the first is in. What the worker does not hear of any more,
it goes on with: the driver does not listen then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlflow.cluster.object_store import put
from rlflow.cluster.placement import Placement
from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.session import LOOPBACK
from rlflow.cluster.slots import PoolLimits
from rlflow.cluster.worker_actors import RayWorkers
from rlflow.components import WEIGHT_TRANSFER
from rlflow.config.schema import RolloutSection, RunConfig
from rlflow.devices.matmul import PRODUCTS, Library
from rlflow.environment import Environment
from rlflow.errors import ConfigError, RolloutError
from rlflow.net.addresses import own_address
from rlflow.report.reductions import reduced
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.codec import from_bytes, to_bytes
from rlflow.rollout.engine import PauseMode, Sent
from rlflow.rollout.engine_facts import engine_facts
from rlflow.rollout.environment_calls import reported
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.event_loop import LoopWatch
from rlflow.rollout.players import Begun, Ended, Player, RemotePlayer
from rlflow.rollout.weight_sync import SyncReport
from rlflow.rollout.weights import WeightPublisher, WeightReader
from rlflow.rollout.workers import (
    Loaded,
    PlayedAttempt,
    Update,
    WorkerFacts,
    WorkerNews,
)
from rlflow.run.assemble import (
    make_environment,
    make_rollout,
    require_trainable,
    rollout_options,
)
from rlflow.run.gpus import engine_gpus, gpu_demand, store_bytes
from rlflow.types import Trajectory

LOOK_S = 0.25
"""How long a look waits for news: short beside the deadline by which a worker counts as hung."""
ANSWER_S = 30.0
"""By which a worker that is looked at has answered; rollout.faults.call_s, by which a call counts
as hung, where that is less."""
BESIDE_ENGINE_S = 60.0
"""What a worker's start takes beside its engine's: imports and the environment."""
PROBE_S = 120.0
"""How long training waits at most for workers to take over weights and answer the probe: while it
trains nobody is compared."""


# ---------------------------------------------------------------- in a worker's process


class RolloutWorker:
    """Plays attempts of a run. threads: of torch; products: the driver's choice of libraries."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        threads: int,
        products: Mapping[str, Library],
    ) -> None:
        torch.set_num_threads(threads)
        PRODUCTS.fix(products)
        self.name = name
        self._config = config
        self._rollout: Rollout | None = None
        self._watch: LoopWatch | None = None
        self._watched_at = 0.0
        self._reader = WeightReader()
        self._player: Player | None = None
        self._wake = threading.Event()

    def build(self) -> WorkerFacts:
        """Makes engine and environment; to be called once, before all else but `look`."""
        rollout = make_rollout(self._config)
        try:
            if len(rollout.engines) != 1:
                raise ConfigError(
                    "cluster.rollout_workers: expected one engine per worker, rollout.engine makes "
                    f"{len(rollout.engines)}; raise rollout_workers in place of it."
                )
            require_trainable(rollout)
            (engine,) = rollout.engines
        except ConfigError:
            rollout.close()
            raise
        self._watch, self._rollout, self._player = (
            rollout.watch(),
            rollout,
            rollout.player(self._wake.set),
        )
        return WorkerFacts(
            rollout.max_total_tokens,
            engine.max_concurrency,
            os.getpid(),
            rollout.hashes_weights,
        )

    def look(self, wait_s: float = LOOK_S) -> WorkerNews:
        """What has happened since the last look, waited for a moment. Raises what is wrong with the
        worker."""
        until = time.monotonic() + wait_s
        while True:
            self._wake.clear()
            news = self._news()
            left_s = until - time.monotonic()
            if news.begun or news.ended or left_s <= 0:
                self._check_loop()
                if self._rollout is not None and self._rollout.failure:
                    # Another worker, with an engine of its own, takes its place
                    raise RolloutError(self._rollout.failure)
                return news
            self._wake.wait(left_s)

    def play(self, jobs: Sequence[Sequence[Attempt]]) -> None:
        """Starts attempts, those of a job together; `look` tells what comes of them."""
        assert self._player is not None
        for attempts in jobs:
            self._player.start(attempts)

    def load(self, update: Update) -> Loaded:
        """Reads published weights, verified by their content, while the engine goes on; then takes
        them over between two of its steps. Where the engine cannot hash them, it answers the
        probe's questions with them."""
        began = time.monotonic()
        read = self._reader.read(update.offer)
        there = time.monotonic()
        self._open.pause(update.mode)
        try:
            answers = self._open.load_and_ask(read.weights, update.version, update.questions)
        except BaseException:
            # With the old weights, or refusing to sample from half of the new ones
            self._open.resume()
            raise
        return Loaded(
            update.version,
            answers[0] if answers else None,
            read.bytes,
            read.delta,
            there - began,
            time.monotonic() - there,
        )

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends attempts."""
        assert self._player is not None
        self._player.cancel(request_ids)

    def report(self) -> dict[str, float]:
        """What the environment reports about the time since the last call."""
        return reported(self._open.environment, self._open.call_s)

    @property
    def _open(self) -> Rollout:
        if self._rollout is None:
            raise RolloutError("rollout worker: it is not built yet")
        return self._rollout

    def _news(self) -> WorkerNews:
        events = [] if self._player is None else self._player.events()
        ended = [
            PlayedAttempt(
                item.request_id,
                np.frombuffer(to_bytes([item.trajectory]), dtype=np.uint8),
            )
            for item in events
            if isinstance(item, Ended)
        ]
        return WorkerNews(tuple(item for item in events if isinstance(item, Begun)), tuple(ended))

    def _check_loop(self) -> None:
        if self._watch is not None and time.monotonic() - self._watched_at >= self._watch.poll_s:
            self._watched_at = time.monotonic()
            self._watch.check()


# ---------------------------------------------------------------- in the driver


class WorkerRollout(Rollout):
    """A Rollout without an engine of its own: the workers of a pool play the attempts, and read the
    weights that it publishes. Its environment tells tasks and metrics; those of the workers play.
    close: ends the workers."""

    def __init__(
        self,
        pool: WorkerPool,
        publisher: WeightPublisher,
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
        self,
        weights: Iterable[Sent],
        version: int,
        probe: WeightProbe | None = None,
    ) -> None:
        """Publishes the weights: each worker reads and verifies them before it gets its next
        attempt. Returns at once, but with a probe: the trainer scores here, in this thread, what
        the workers' engines answer. Who takes longer than PROBE_S, or joins later, passes while
        attempts are waited for, when the trainer still has the same weights.

        Raises RolloutError where no worker samples from what was sent."""
        report = self.synced = SyncReport()
        with report.part("publish"):
            pairs = cast("Iterable[tuple[str, Tensor]]", report.gathered(weights))
            offer = self._publisher.publish(pairs, version)
        self.version = version
        questions = None if probe is None else probe.questions
        self.pool.update(Update(offer, self._mode, questions), probe)
        if probe is not None:
            with report.part("verify"):
                self.pool.await_passed(PROBE_S)

    @property
    def hashes_weights(self) -> bool:
        return self.pool.first_facts().hashes_weights

    def take_report(self) -> None:
        """Makes `report` what all workers' environments say about the time since the last call."""
        self.report = reduced(self.pool.reports(), self.environment.metrics)

    def counts(self) -> dict[str, float]:
        return self.pool.counts()

    def close(self) -> None:
        """Ends the workers; the driver's own environment is shut down too."""
        try:
            super().close()
        finally:
            self._publisher.close()
            self._close()


def make_run_rollout(config: RunConfig, placement: Placement | None = None) -> Rollout:
    """The rollout of a run: in this process, or of `cluster.rollout_workers` others. The caller
    closes it."""
    if config.cluster.rollout_workers:
        return make_worker_rollout(config, placement)
    engine = engine_facts(config.rollout.engine)
    return make_rollout(config, engine_gpus(config.cluster, engine, placement))


def make_worker_rollout(config: RunConfig, placement: Placement | None = None) -> WorkerRollout:
    """The rollout of a configuration over `cluster.rollout_workers` workers, on the GPUs of a
    placement where they share those of the ranks; the caller closes it."""
    if config.run.deterministic:
        PRODUCTS.fix()
    section = config.cluster
    engine = engine_facts(config.rollout.engine)
    demand = gpu_demand(section, engine)
    host = own_address(section.address) if section.address else LOOPBACK
    here = {} if host == LOOPBACK else {"host": host}  # else everybody is on this machine
    environment = make_environment(config.environment, **({"network_host": host} if here else {}))
    tokenizer = Tokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    publisher = WEIGHT_TRANSFER.build(section.weight_transfer, "cluster.weight_transfer", put=put)
    workers = RayWorkers(
        partial(
            RolloutWorker,
            replace(
                config,
                environment={**config.environment, **environment.worker_options()},
            ),
        ),
        section.rollout_workers,
        read=_read,
        limits=pool_limits(config.rollout),
        address=section.address,
        threads=section.threads_per_rank,
        gpus=section.gpus_per_rank,
        each=demand.each,
        cpus=section.rollout_workers * section.threads_per_rank,
        store_bytes=store_bytes(config.model, engine, config.trainer.lora),
        placement=placement if section.gpus_per_rank and demand.shared else None,
    )
    try:
        return WorkerRollout(
            workers.pool,
            publisher,
            environment,
            tokenizer,
            workers.close,
            **rollout_options(config.rollout, config.run),
        )
    except BaseException:
        workers.close()
        raise


def pool_limits(section: RolloutSection) -> PoolLimits:
    """By when workers of the run are given up: to start, each may take longer than its engine."""
    faults = section.faults
    start_s = engine_facts(section.engine).start_limit_s() + BESIDE_ENGINE_S
    return PoolLimits(
        answer_s=min(ANSWER_S, faults.call_s),
        start_s=max(PoolLimits.start_s, start_s),
        attempt_s=faults.episode_s + faults.call_s,
    )


def _read(payload: np.ndarray[Any, Any]) -> Trajectory:
    (trajectory,) = from_bytes(payload.tobytes(), "an attempt from a rollout worker")
    return trajectory
