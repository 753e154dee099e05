"""Rollout workers as a pool: looked at, replaced when they die or hang, brought to the newest
weights, and given attempts.

A worker that stops answering loses what it plays, and nothing else: whoever started these attempts
hears `Lost` and may start them again. A coroutine per worker does everything, in one event loop;
callers put attempts in and take news out. Deadlines count the time in which this process ran."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.cluster.actors import ActorDied
from rlflow.cluster.slots import EpisodeJob, Handle, PoolLimits, WorkerSlot, chosen, weight_reads
from rlflow.errors import RLFlowError, RolloutError, described
from rlflow.net.calls import RunningTime, deadline
from rlflow.rollout.episodes import MISTAKES, Attempt
from rlflow.rollout.event_loop import LoopThread, all_of, cancel_all
from rlflow.rollout.players import Inbox
from rlflow.rollout.weight_sync import WeightProbe, compare_probes
from rlflow.rollout.workers import Loaded, Update, WorkerFacts, WorkerNews
from rlflow.types import Trajectory

logger = logging.getLogger(__name__)

TURN_S = 0.25
LONGEST_BACK_OFF_S = 60.0
FAILED_LOADS = 3  # of weights, in a row, that cost a worker its place
REPORT_S = 5.0  # for a worker to say what its environment reports


class WorkerPool:
    """`count` workers, started at once and kept alive until `close`.

    launch: makes the worker of a name. read: a trajectory of its bytes."""

    def __init__(
        self,
        launch: Callable[[str], Handle],
        count: int,
        read: Callable[[Any], Trajectory],
        limits: PoolLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self._launch, self._read = limits, launch, read
        self._time = RunningTime(TURN_S, clock)
        self._slots = [WorkerSlot(str(number)) for number in range(count)]
        self._target: Update | None = None
        self._probe: WeightProbe | None = None
        self._waiting: list[EpisodeJob] = []
        self._failure: RLFlowError | None = None
        self._last_reason = "none has started yet"
        self._lost = self._restarts = 0  # since the last report
        self._due = False  # a dispatch is about to come
        self._loop = LoopThread("rlflow-workers")
        self._running = self._loop.start_all([self._mind(), *map(self._keep, self._slots)])

    # --- for callers ----------------------------------------------------------------------------

    def first_facts(self) -> WorkerFacts:
        """What the first worker that is up says of itself, waited for. Raises RLFlowError where
        none comes up."""
        while True:
            self.check()
            for slot in self._slots:
                if slot.facts is not None:
                    return slot.facts
            time.sleep(0.02)

    @property
    def down(self) -> list[str]:
        """Names of workers that are not up."""
        return [slot.name for slot in self._slots if slot.facts is None]

    def update(self, update: Update, probe: WeightProbe | None = None) -> None:
        """Every worker takes over these weights, as soon as it can, and gets no new attempt before
        it has. probe: what its answers to the update's questions are compared by, in `compare`."""

        async def tell() -> None:
            self._target, self._probe = update, probe
            for slot in self._slots:
                slot.outdated.set()

        self._loop.run(tell())

    def await_passed(self, within_s: float) -> None:
        """Waits until all workers that are up have the newest weights, compared by the probe, or so
        many seconds are over."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            self.check()
            if all(self._is_current(slot) for slot in self._slots if slot.facts is not None):
                break
            time.sleep(0.02)
        self.compare()

    def compare(self) -> None:
        """Compares what workers have answered to the probe with the trainer, in the caller's
        thread: to be called only while the trainer has the weights of the last `update`. A worker
        that has others loses its place; where no other one is up, the pool ends: it is the transfer
        that is wrong, for all that is known.

        Raises what ended the pool."""
        self.check()
        probe = self._probe
        if probe is None:
            return
        current = [(slot, slot.loaded) for slot in self._slots if self._is_current(slot)]
        asked = [(slot, one, one.answers) for slot, one in current if one and one.answers]
        if asked:
            answers = [given for _, _, given in asked]
            errors = compare_probes(probe, answers, asked[0][1].version)
            self._loop.run(self._judge([(*one[:2], error) for one, error in zip(asked, errors)]))
            self.check()

    def play(self, attempts: Sequence[Attempt], inbox: Inbox) -> None:
        """One worker with the newest weights plays the attempts, as soon as it has room; all end at
        once, or are lost."""
        job = EpisodeJob(attempts, inbox, {attempt.request_id for attempt in attempts})

        async def wait() -> None:
            self._waiting.append(job)
            self._dispatch_soon()

        self._loop.start(wait())

    def cancel(self, inbox: Inbox, request_ids: set[str]) -> None:
        """Forgets attempts; of a job the others too."""

        async def forget() -> None:
            self._waiting = [
                job for job in self._waiting if job.inbox is not inbox or not job.left & request_ids
            ]
            for slot in self._slots:
                names = request_ids & slot.jobs.keys()
                gone = [name for name in names if slot.jobs[name].inbox is inbox]
                for name in gone:
                    del slot.jobs[name]
                if gone and slot.handle is not None:
                    slot.handle.call("cancel", gone)
            self._dispatch_soon()

        self._loop.run(forget())

    def check(self) -> None:
        """Raises what ended the pool."""
        if self._failure is not None:
            raise self._failure

    def reports(self) -> list[dict[str, float]]:
        """What the workers' environments report about the time since the last call; nothing of one
        that does not answer."""

        async def ask(slot: WorkerSlot) -> dict[str, float] | None:
            try:
                return await asyncio.wait_for(slot.call("report"), REPORT_S)
            except (TimeoutError, RLFlowError) as error:
                logger.info("a rollout worker does not say what its environment reports: %s", error)
                return None

        found = self._loop.run(all_of(ask(slot) for slot in self._slots if slot.facts is not None))
        return [report for report in found if report is not None]

    def counts(self) -> dict[str, float]:
        """`workers/` metrics since the last call."""

        async def count() -> dict[str, float]:
            ended = [slot.ended for slot in self._slots]
            counted = {
                "workers/up": float(sum(slot.facts is not None for slot in self._slots)),
                "workers/restarts": float(self._restarts),
                "workers/attempts_lost": float(self._lost),
                "workers/attempts_most": float(max(ended)),
                "workers/attempts_fewest": float(min(ended)),
            }
            self._restarts = self._lost = 0
            for slot in self._slots:
                slot.ended = 0
            return counted | weight_reads(self._slots)

        return self._loop.run(count())

    def close(self) -> None:
        """Ends all workers."""
        cancel_all(self._running)
        self._loop.close()

    # --- a worker's life ------------------------------------------------------------------------

    async def _keep(self, slot: WorkerSlot) -> None:
        """Keeps a process in the place, until too many have failed."""
        while slot.failures < self.limits.failures:
            try:
                await self._live(slot)
            except MISTAKES as error:
                self._failure = error
                return
            except Exception as error:  # noqa: BLE001 -- whatever it answers: the others go on
                await asyncio.sleep(self._give_up(slot, error))

    async def _live(self, slot: WorkerSlot) -> None:
        """A process of a worker, until something is wrong with it: that is raised."""
        slot.broken = asyncio.get_running_loop().create_future()
        slot.handle = self._launch(slot.name)
        parts = [asyncio.ensure_future(part) for part in (self._look(slot), self._work(slot))]
        try:
            await asyncio.gather(slot.broken, *parts)
        finally:
            for part in parts:
                part.cancel()
            slot.handle.kill()
            slot.handle = slot.facts = slot.loaded = slot.broken = None
            await asyncio.gather(*parts, return_exceptions=True)

    async def _look(self, slot: WorkerSlot) -> None:
        """Hears what happens in the worker, and whether it still answers."""
        async with deadline(self.limits.place_s, "the cluster's making room for it"):
            news: WorkerNews = await slot.call("look")
        slot.placed = True
        while True:
            slot.held.append(news)
            self._hear_held(slot)
            now = self._time.look()
            late = [name for name, job in slot.jobs.items() if now > job.until]
            if late:
                raise RolloutError(
                    f"{len(late)} attempts did not end within {self.limits.attempt_s:g} s, "
                    f"{late[0]} for one"
                )
            async with deadline(self.limits.answer_s, "a look at it"):
                news = await slot.call("look")

    async def _work(self, slot: WorkerSlot) -> None:
        """Builds the worker and brings it to the newest weights, again and again."""
        limits, begun, failed = self.limits, time.monotonic(), 0
        async with deadline(limits.start_s + limits.place_s, "making engine and environment"):
            facts: WorkerFacts = await slot.call("build")
        slot.facts, slot.placed = facts, True
        told = "rollout worker %s is up after %.1f s, process %d"
        logger.info(told, slot.name, time.monotonic() - begun, facts.pid)
        slot.outdated.set()
        while True:
            await slot.outdated.wait()
            slot.outdated.clear()
            if self._target is None or self._is_current(slot):
                self._dispatch_soon()
                continue
            async with deadline(limits.start_s, "taking over weights"):
                try:
                    await self._load(slot, self._target)
                    failed = 0
                except RLFlowError as error:
                    failed += 1
                    told = "rollout worker %s could not take over weights, %d times so far: %s"
                    logger.warning(told, slot.name, failed, error)
                    if failed == FAILED_LOADS or isinstance(error, ActorDied):
                        raise
                    slot.outdated.set()

    async def _load(self, slot: WorkerSlot, target: Update) -> None:
        """The worker takes over the weights."""
        # The trainer has no longer what it would be compared with
        if slot.loaded is not None and slot.handle is not None:
            slot.handle.call("cancel", list(slot.jobs))
            told = f"version {slot.version} was replaced before it could be compared"
            self._lost += slot.lose(told)
        slot.loading, slot.loaded = True, None
        try:
            taken: Loaded = await slot.call("load", target)
        finally:
            slot.loading = False
        slot.loaded = taken
        slot.reads.append(taken)
        if taken.answers is None:
            self._pass(slot)

    def _give_up(self, slot: WorkerSlot, error: Exception) -> float:
        """The worker is lost, with all that it plays; another process takes its place after so many
        seconds, later the more often that happens."""
        limits = self.limits
        reason = str(error) if isinstance(error, RLFlowError) else described(error)
        lost = slot.lose(reason)
        self._lost += lost
        slot.failures += slot.placed  # one for which there is no room has done nothing wrong
        slot.held, slot.passed, slot.placed = [], -1, False
        doubled_s = limits.back_off_s * 2 ** max(0, slot.failures - 1)
        back_off_s = min(LONGEST_BACK_OFF_S, doubled_s)
        self._last_reason = f"worker {slot.name}: {reason}"
        then = f"another one starts in {back_off_s:g} s"
        if slot.failures >= limits.failures:
            then = (
                f"it failed {slot.failures} times without an attempt that ended, and is not "
                "started again"
            )
        else:
            self._restarts += 1
        again = f"{lost} attempts are issued again; " if lost else ""
        logger.warning("rollout worker %s: %s; %s%s", slot.name, reason, again, then)
        return back_off_s

    # --- in the loop ----------------------------------------------------------------------------

    async def _mind(self) -> None:
        """Ends the pool where no worker has been up for too long."""
        up_at = 0.0
        while self._failure is None:
            await asyncio.sleep(TURN_S)
            now = self._time.look()
            if any(slot.facts is not None for slot in self._slots):
                up_at = now
            given_up = all(slot.failures >= self.limits.failures for slot in self._slots)
            if given_up or now - up_at > self.limits.start_s:
                self._failure = RolloutError(
                    f"cluster.rollout_workers: not one of {len(self._slots)} workers has been up "
                    f"for {now - up_at:.0f} s; last: {self._last_reason}; run.log has the others. "
                    "--resume goes on from the last checkpoint."
                )

    async def _judge(self, found: Sequence[tuple[WorkerSlot, Loaded, RLFlowError | None]]) -> None:
        """What the probe says of workers: no error, or which."""
        wrong: dict[WorkerSlot, RLFlowError] = {}
        for slot, loaded, error in found:
            if slot.loaded is not loaded:
                continue  # another process is there by now
            if error is None:
                self._pass(slot)
            else:
                wrong[slot] = error
                slot.fail(error)
        if wrong and all(slot.facts is None or slot in wrong for slot in self._slots):
            self._failure = next(iter(wrong.values()))
        while any(slot.loaded is not None for slot in wrong):  # until it has been ended
            await asyncio.sleep(0)

    def _is_current(self, slot: WorkerSlot) -> bool:
        return self._target is None or slot.version == self._target.version

    def _pass(self, slot: WorkerSlot) -> None:
        assert slot.loaded is not None
        slot.passed, slot.loaded = slot.loaded.version, None
        self._hear_held(slot)
        self._dispatch_soon()

    def _hear_held(self, slot: WorkerSlot) -> None:
        if slot.proven:
            held, slot.held = slot.held, []
            for news in held:
                slot.hear(news, self._read)
            self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """After what else is there to be heard just now: attempts go together where they can."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Gives attempts to the workers that have the newest weights and room."""
        self._due = False
        up = [slot for slot in self._slots if slot.facts is not None and not slot.loading]
        target = self._target
        ready = [slot for slot in up if target is None or slot.passed == target.version]
        given: dict[WorkerSlot, list[Sequence[Attempt]]] = {}
        left: list[EpisodeJob] = []
        until = self._time.look() + self.limits.attempt_s
        for job in sorted(self._waiting, key=lambda job: not job.first):
            slot = chosen(ready, job)
            if slot is None:
                left.append(job)
                continue
            job.until = until
            slot.jobs.update(dict.fromkeys(job.left, job))
            given.setdefault(slot, []).append(job.attempts)
        self._waiting = left
        for slot, plays in given.items():
            slot.play(plays)
