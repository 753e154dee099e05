"""Rollout workers as a pool: looked at, replaced when they die or hang, brought to the newest weights, and given attempts.

A worker that stops answering loses what it plays, and nothing else: whoever started these attempts hears `Lost` and may start
them again. One thread does everything here; callers put attempts in and take news out. How workers are made is the business of
`launch`: actors of Ray in a run, threads in tests.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.cluster.slots import EpisodeJob, Handle, PoolLimits, WorkerGone, WorkerSlot, chosen, weight_reads
from rlflow.errors import ConfigError, EnvironmentContractError, ModelError, RLFlowError, RolloutError
from rlflow.rollout.calls import RunningTime
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.players import Begun, Ended, Inbox, Lost
from rlflow.rollout.weight_sync import WeightProbe, compare_probes
from rlflow.rollout.workers import Loaded, Update, WorkerFacts, WorkerNews
from rlflow.types import Trajectory

logger = logging.getLogger(__name__)

MISTAKES = (EnvironmentContractError, ModelError, ConfigError)
"""Errors of the set-up, which every worker would meet: the run ends."""
TURN_S = 0.25  # of the thread, where nothing happens sooner
LONGEST_BACK_OFF_S = 60.0
REPORT_S = 5.0  # for a worker to say what its environment reports


class WorkerPool:
    """`count` workers, started at once and kept alive until `close`.

    launch: makes the worker of a name. read: a trajectory of its bytes. watch: called when a worker came up, and now and then."""

    def __init__(
        self,
        launch: Callable[[str], Handle],
        count: int,
        read: Callable[[Any], Trajectory],
        limits: PoolLimits | None = None,
        watch: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or PoolLimits()
        self._launch = launch
        self._read = read
        self._watch = watch
        self._time = RunningTime(TURN_S, clock)
        self._slots = [WorkerSlot(str(number)) for number in range(count)]
        self._target: Update | None = None
        self._probe: WeightProbe | None = None
        self._waiting: list[EpisodeJob] = []
        self._failure: RLFlowError | None = None
        self._last_reason = "none has started yet"
        self._up_at = 0.0
        self._lost = self._restarts = 0  # since the last report
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlflow-workers", daemon=True)
        self._thread.start()

    # --- for callers --------------------------------------------------------------------------------------------------

    def first_facts(self) -> WorkerFacts:
        """What the first worker that is up says of itself, waited for. Raises RLFlowError where none comes up."""
        while True:
            self.check()
            with self._lock:
                for slot in self._slots:
                    if slot.facts is not None:
                        return slot.facts
            time.sleep(0.02)

    def update(self, update: Update, probe: WeightProbe | None = None) -> None:
        """Every worker takes over these weights, as soon as it can, and gets no new attempt before it has. probe: what its
        answers to the update's questions are compared by, in `compare`."""
        with self._lock:
            self._target, self._probe = update, probe
        self._wake.set()

    def await_passed(self, within_s: float) -> None:
        """Waits until all workers that are up have the newest weights, compared by the probe, or so many seconds are over."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            self.check()
            with self._lock:
                wanted = -1 if self._target is None else self._target.version
                if all(slot.version == wanted for slot in self._slots if slot.state == "up"):
                    break
            time.sleep(0.02)
        self.compare()

    def compare(self) -> None:
        """Compares what workers have answered to the probe with the trainer, in the caller's thread: to be called only while the
        trainer has the weights of the last `update`. A worker that has others loses its place; where no other one is up, the
        pool ends: it is the transfer that is wrong, for all that is known.

        Raises what ended the pool."""
        self.check()
        with self._lock:
            probe, version = self._probe, -1 if self._target is None else self._target.version
            asked = [
                (slot, slot.loaded, slot.loaded.answers)
                for slot in self._slots
                if slot.loaded is not None and slot.loaded.answers is not None and slot.loaded.version == version
            ]
        if probe is None or not asked:
            return
        errors = compare_probes(probe, [answers for _, _, answers in asked], version)
        with self._lock:
            for (slot, loaded, _), error in zip(asked, errors, strict=True):
                if slot.loaded is not loaded:
                    continue  # the worker has died meanwhile
                if error is None:
                    self._pass(slot)
                else:
                    self._fail(slot, error, self._time.seconds)
            found = next((error for error in errors if error is not None), None)
            if found is not None and not any(slot.state == "up" for slot in self._slots):
                self._failure = found
        self._wake.set()
        self.check()

    def play(self, attempts: Sequence[Attempt], inbox: Inbox) -> None:
        """One worker with the newest weights plays the attempts, as soon as it has room; all end at once, or are lost."""
        job = EpisodeJob(attempts, inbox, {attempt.request_id for attempt in attempts})
        with self._lock:
            place = sum(other.first for other in self._waiting) if job.first else len(self._waiting)
            self._waiting.insert(place, job)
        self._wake.set()

    def cancel(self, inbox: Inbox, request_ids: set[str]) -> None:
        """Forgets attempts; of a job the others too."""
        with self._lock:
            self._waiting = [job for job in self._waiting if job.inbox is not inbox or not job.left & request_ids]
            for slot in self._slots:
                gone = [name for name, job in slot.jobs.items() if job.inbox is inbox and name in request_ids]
                for name in gone:
                    del slot.jobs[name]
                if gone and slot.handle is not None:
                    slot.handle.call("cancel", gone)

    def check(self) -> None:
        """Raises what ended the pool."""
        if self._failure is not None:
            raise self._failure
        if not self._closed and not self._thread.is_alive():
            raise RolloutError(
                "cluster.rollout_workers: the thread that looks after them has ended; its error is in the log."
            )

    def reports(self) -> list[dict[str, float]]:
        """What the workers' environments report about the time since the last call; nothing of one that does not answer."""
        with self._lock:
            asked = [
                slot.handle.call("report") for slot in self._slots if slot.state == "up" and slot.handle is not None
            ]
        until, found = time.monotonic() + REPORT_S, []
        for call in asked:
            try:
                found.append(call.result(timeout=max(0.0, until - time.monotonic())))
            except (TimeoutError, RLFlowError) as error:
                logger.info("a rollout worker does not say what its environment reports: %s", error)
        return found

    def counts(self) -> dict[str, float]:
        """`workers/` metrics since the last call."""
        with self._lock:
            ended = [slot.ended for slot in self._slots]
            counted = {
                "workers/up": float(sum(slot.state == "up" for slot in self._slots)),
                "workers/restarts": float(self._restarts),
                "workers/attempts_lost": float(self._lost),
                "workers/attempts_most": float(max(ended)),
                "workers/attempts_fewest": float(min(ended)),
            }
            self._restarts = self._lost = 0
            counted |= weight_reads(self._slots)
            for slot in self._slots:
                slot.ended = 0
        return counted

    def close(self) -> None:
        """Ends all workers."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=self.limits.answer_s)
        for slot in self._slots:
            if slot.handle is not None:
                slot.handle.kill()
                slot.handle = None

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        for turn in itertools.count():
            self._wake.wait(TURN_S)
            self._wake.clear()
            if self._closed or self._failure is not None:
                return
            with self._lock:
                self._turn()
            if turn % 20 == 0:
                self._watch()

    def _turn(self) -> None:
        """Everything that is due now."""
        before, now = self._time.seconds, self._time.look()
        for slot in self._slots:
            if slot.state == "down" and now >= slot.retry_at:
                self._begin(slot, now)
            if slot.state in ("starting", "up"):
                try:
                    self._look_after(slot, now, now - before)
                except Exception as error:  # noqa: BLE001 -- whatever a worker answers, it must not end the others
                    self._fail(slot, error, now)
        if any(slot.state == "up" for slot in self._slots):
            self._up_at = now
        elif all(slot.state == "quarantined" for slot in self._slots) or now - self._up_at > self.limits.start_s:
            self._failure = RolloutError(
                f"cluster.rollout_workers: not one of {len(self._slots)} workers has been up for {now - self._up_at:.0f} s; "
                f"last: {self._last_reason}; run.log has the others. --resume goes on from the last checkpoint."
            )
        self._dispatch(now)

    def _begin(self, slot: WorkerSlot, now: float) -> None:
        slot.state, slot.since, slot.silent_s, slot.placed = "starting", now, 0.0, False
        slot.facts, slot.failed_loads, slot.calls, slot.plays = None, 0, {}, []
        try:
            slot.handle = self._launch(slot.name)
            self._call(slot, "build")
            self._call(slot, "look")
        except Exception as error:  # noqa: BLE001 -- as above
            self._fail(slot, error, now)

    def _call(self, slot: WorkerSlot, method: str, *arguments: Any) -> None:
        assert slot.handle is not None
        slot.calls[method] = call = slot.handle.call(method, *arguments)
        call.add_done_callback(lambda _: self._wake.set())

    def _look_after(self, slot: WorkerSlot, now: float, elapsed: float) -> None:
        """What the worker has answered. Raises what is wrong with it."""
        limits = self.limits
        slot.silent_s += elapsed
        if slot.calls["look"].done():
            news: WorkerNews = slot.calls["look"].result()
            slot.silent_s, slot.placed = 0.0, True
            slot.held.append(news)
            self._hear_held(slot)
            self._call(slot, "look")
        elif slot.silent_s > (limits.answer_s if slot.placed else limits.place_s):
            raise RolloutError(
                f"no answer for {slot.silent_s:.0f} s" if slot.placed else "no room for it in the cluster"
            )
        if slot.state == "starting":
            if slot.calls["build"].done():
                slot.facts = slot.calls.pop("build").result()
                slot.state, slot.placed = "up", True
                logger.info(
                    "rollout worker %s is up after %.1f s, process %d", slot.name, now - slot.since, slot.facts.pid
                )
                self._watch()
            elif slot.placed and now - slot.since > limits.start_s + limits.place_s:
                raise RolloutError(f"engine and environment were not made within {limits.start_s:g} s")
        if slot.state == "up":
            self._bring_up_to_date(slot, now)
        for play in [play for play in slot.plays if play.done()]:
            slot.plays.remove(play)
            play.result()
        late = [name for name, job in slot.jobs.items() if now > job.until]
        if late:
            raise RolloutError(f"{len(late)} attempts did not end within {limits.attempt_s:g} s, {late[0]} for one")

    def _bring_up_to_date(self, slot: WorkerSlot, now: float) -> None:
        target, loading = self._target, slot.calls.get("load")
        if loading is not None and loading.done():
            del slot.calls["load"]
            try:
                taken: Loaded = loading.result()
                slot.failed_loads, slot.loaded = 0, taken
                slot.reads.append(taken)
                if taken.answers is None:
                    self._pass(slot)
            except RLFlowError as error:
                slot.failed_loads += 1
                told = "rollout worker %s could not take over weights, %d times so far: %s"
                logger.warning(told, slot.name, slot.failed_loads, error)
                if slot.failed_loads >= 3 or isinstance(error, WorkerGone):
                    raise
        elif loading is not None and now - slot.loading_since > self.limits.start_s:
            raise RolloutError(f"weights were not taken over within {self.limits.start_s:g} s")
        if "load" not in slot.calls and target is not None and slot.version != target.version:
            if (
                slot.loaded is not None and slot.handle is not None
            ):  # the trainer has no longer what it would be compared with
                slot.handle.call("cancel", list(slot.jobs))
                self._lose(slot, f"version {slot.version} was replaced before the probe could be compared")
            slot.loading_since, slot.loaded = now, None
            self._call(slot, "load", target)

    def _pass(self, slot: WorkerSlot) -> None:
        assert slot.loaded is not None
        slot.passed, slot.loaded = slot.loaded.version, None
        self._hear_held(slot)

    def _hear_held(self, slot: WorkerSlot) -> None:
        if slot.proven:
            held, slot.held = slot.held, []
            for news in held:
                self._hear(slot, news)

    def _hear(self, slot: WorkerSlot, news: WorkerNews) -> None:
        for begun in news.begun:
            job = slot.jobs.get(begun.request_id)
            if job is not None:
                job.inbox.put([Begun(begun.request_id, begun.version, slot.name)])
        for played in news.ended:
            job = slot.jobs.pop(played.request_id, None)
            if job is None:
                continue  # cancelled in the meantime
            slot.failures, slot.ended = 0, slot.ended + 1
            job.left.discard(played.request_id)
            job.ended.append(Ended(played.request_id, self._read(played.payload)))
            if not job.left:
                job.inbox.put(job.ended)

    def _fail(self, slot: WorkerSlot, error: Exception, now: float) -> None:
        """The worker is lost, with all that it plays; another process takes its place, later the more often that happens."""
        if isinstance(error, MISTAKES):
            self._failure = error
            return
        placed, limits = slot.placed, self.limits
        reason = str(error) if isinstance(error, RLFlowError) else f"{type(error).__name__}: {error}"
        lost = self._lose(slot, reason)
        if slot.handle is not None:
            slot.handle.kill()
        slot.handle, slot.calls, slot.plays, slot.facts = None, {}, [], None
        slot.loaded, slot.held, slot.passed = None, [], -1
        slot.failures += placed  # one for which there is no room has done nothing wrong
        slot.state = "quarantined" if slot.failures >= limits.failures else "down"
        back_off_s = min(LONGEST_BACK_OFF_S, limits.back_off_s * 2 ** max(0, slot.failures - 1))
        slot.retry_at, self._last_reason = now + back_off_s, f"worker {slot.name}: {reason}"
        self._restarts += slot.state == "down"
        then = f"another one starts in {back_off_s:g} s"
        if slot.state == "quarantined":
            then = f"it failed {slot.failures} times without an attempt that ended, and is not started again"
        again = f"{lost} attempts are issued again; " if lost else ""
        logger.warning("rollout worker %s: %s; %s%s", slot.name, reason, again, then)

    def _lose(self, slot: WorkerSlot, reason: str) -> int:
        """Tells that what the worker plays is lost; returns how many attempts."""
        jobs, slot.jobs = list(dict.fromkeys(slot.jobs.values())), {}
        lost = 0
        for job in jobs:
            job.inbox.put([Lost(attempt.request_id, slot.name, reason) for attempt in job.attempts])
            lost += len(job.attempts)
        self._lost += lost
        return lost

    def _dispatch(self, now: float) -> None:
        """Gives attempts to the workers that have the newest weights and room."""
        target = self._target
        ready = [
            slot
            for slot in self._slots
            if slot.state == "up" and "load" not in slot.calls and (target is None or slot.passed == target.version)
        ]
        given: dict[WorkerSlot, list[Sequence[Attempt]]] = {}
        left: list[EpisodeJob] = []
        for job in self._waiting:
            slot = chosen(ready, job)
            if slot is None:
                left.append(job)
                continue
            job.until = now + self.limits.attempt_s
            slot.jobs.update(dict.fromkeys(job.left, job))
            given.setdefault(slot, []).append(job.attempts)
        self._waiting = left
        for slot, plays in given.items():
            assert slot.handle is not None
            slot.plays.append(slot.handle.call("play", plays))
