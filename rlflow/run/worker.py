"""A rollout worker: engine, environment and event loop of a configuration, in a process of its own.

The driver calls its methods from afar; one thread plays, loads and cancels, another one is looked
at, so that it answers whatever the first is in. What the worker does not hear of any more, it goes
on with: the driver does not listen then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from rlflow.codec import to_bytes
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, RolloutError
from rlflow.matmul import PRODUCTS, Library
from rlflow.rollout import Rollout
from rlflow.rollout.environment_calls import reported
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.event_loop import LoopWatch
from rlflow.rollout.players import Begun, Ended, Player
from rlflow.rollout.transfer.base import WeightReader
from rlflow.rollout.transfer.readers import open_reader
from rlflow.rollout.workers import Loaded, PlayedAttempt, Update, WorkerFacts, WorkerNews
from rlflow.run.assemble import make_rollout, trainable

LOOK_S = 0.25
"""How long a look waits for news: short beside the deadline by which a worker counts as hung."""
READ_S = 120.0  # for weights that were published


class RolloutWorker:
    """Plays attempts of a run. make: what makes its rollout; threads: of torch; products: the
    driver's choice of libraries."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        threads: int,
        products: Mapping[str, Library] | None,
        make: Callable[[RunConfig], Rollout] = make_rollout,
    ) -> None:
        torch.set_num_threads(threads)
        PRODUCTS.fix(products)
        self.name = name
        self._config = config
        self._make = make
        self._rollout: Rollout | None = None
        self._watch: LoopWatch | None = None
        self._watched_at = 0.0
        self._reader: tuple[str, WeightReader] | None = None
        self._player: Player | None = None
        self._wake = threading.Event()

    def build(self) -> WorkerFacts:
        """Makes engine and environment; to be called once, before all else but `look`."""
        rollout = self._make(self._config)
        try:
            if len(rollout.engines) != 1:
                raise ConfigError(
                    f"cluster.rollout_workers: expected one engine per worker, rollout.engine makes {len(rollout.engines)}; "
                    "raise rollout_workers in place of it."
                )
            (engine,) = trainable(rollout).engines
        except ConfigError:
            rollout.close()
            raise
        self._watch, self._rollout, self._player = (
            rollout.watch(),
            rollout,
            rollout.player(self._wake.set),
        )
        return WorkerFacts(
            rollout.max_total_tokens, engine.max_concurrency, os.getpid(), rollout.hashes_weights
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
        """Takes over published weights between two steps of the engine, verified by their content;
        where the engine cannot hash them, it answers the probe's questions with them."""
        if self._reader is not None and self._reader[0] != update.address:
            self._reader[1].close()
            self._reader = None
        if self._reader is None:
            self._reader = update.address, open_reader(update.address, update.key)
        self._open.pause(update.mode)
        reader = self._reader[1]
        before = reader.bytes_read
        try:
            weights = reader.read(update.version, READ_S)
            answers = self._open.load_and_ask(weights, update.version, update.questions)
        except BaseException:
            # With the old weights, or refusing to sample from half of the new ones
            self._open.resume()
            raise
        return Loaded(
            update.version,
            answers[0] if answers else None,
            reader.bytes_read - before,
            reader.delta,
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
                item.request_id, np.frombuffer(to_bytes([item.trajectory]), dtype=np.uint8)
            )
            for item in events
            if isinstance(item, Ended)
        ]
        return WorkerNews(tuple(item for item in events if isinstance(item, Begun)), tuple(ended))

    def _check_loop(self) -> None:
        if self._watch is not None and time.monotonic() - self._watched_at >= self._watch.poll_s:
            self._watched_at = time.monotonic()
            self._watch.check()
