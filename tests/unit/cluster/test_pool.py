"""A pool of rollout workers, here threads: who dies, hangs or is late loses what it plays; all get the newest weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.cluster.actors import ActorDied
from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.slots import PoolLimits, WorkerSlot
from rlflow.cluster.worker_actors import await_all
from rlflow.errors import ConfigError, RLFlowError, RolloutError
from rlflow.rollout.deterministic import TurnSeeds
from rlflow.rollout.engine import Completion
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.groups import Groups, Terms
from rlflow.rollout.pacing import ANY_AGE, Pacing
from rlflow.rollout.players import Begun, Ended, Event, Lost, RemotePlayer
from rlflow.rollout.weight_sync import WeightProbe
from rlflow.rollout.weights import Offer
from rlflow.rollout.workers import Loaded, PlayedAttempt, Update, WorkerFacts, WorkerNews
from rlflow.types import StopReason, Task, Trajectory
from tests.waiting import until

LIMITS = PoolLimits(
    answer_s=1.0, place_s=5.0, start_s=3.0, attempt_s=30.0, failures=3, back_off_s=0.02
)


def attempt(name: str, group: str = "g", number: int = 0) -> Attempt:
    return Attempt(Task("t", "?"), group, name, TurnSeeds(0, group, number), number, name)


def offer(version: int) -> Offer:
    return Offer(version, "", 0, (), ())


def trajectory(payload: Any) -> Trajectory:
    """Its id is the request's and the worker's that played it."""
    name = payload.tobytes().decode()
    group, _, rest = name.partition("#")
    return Trajectory(
        "t",
        group,
        [],
        [],
        1.0,
        StopReason.TERMINATED,
        attempt=int(rest.partition("@")[0] or 0),
        id=name,
    )


class Worker:
    """Plays what it is given at once, unless it is told to hold. dead: raises as an actor that is gone; stopped: says nothing."""

    def __init__(self, name: str, workers: Workers) -> None:
        self.name, self.workers = name, workers
        self.threads = ThreadPoolExecutor(4)
        self.version, self.dead, self.stopped = 0, False, threading.Event()
        self.played: list[Sequence[Attempt]] = []  # by job
        self.news: tuple[list[Begun], list[PlayedAttempt]] = ([], [])
        self.lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self.threads.submit(self._call, method, *arguments)

    def _call(self, method: str, *arguments: Any) -> Any:
        while self.stopped.is_set() and not self.dead:
            time.sleep(0.01)
        if self.dead:
            raise ActorDied("its process died")
        return getattr(self, method)(*arguments)

    def kill(self) -> None:
        self.dead = True

    def build(self) -> WorkerFacts:
        if self.workers.broken is not None:
            raise self.workers.broken
        return WorkerFacts(16, self.workers.places, 1, self.workers.probed is None)

    def look(self) -> WorkerNews:
        time.sleep(0.01)
        with self.lock:
            (begun, ended), self.news = self.news, ([], [])
        return WorkerNews(tuple(begun), tuple(ended))

    def load(self, update: Update) -> Loaded:
        self.workers.loads.append((self.name, update.version))
        if self.workers.unreadable:
            raise RolloutError("weight transfer: a tensor is not what was published")
        self.version = update.version
        if self.workers.probed is None:
            return Loaded(update.version, None, 3 << 20, update.version == 2, 0.5, 0.25)
        assert update.questions is not None
        kept = update.version - (
            self.name in self.workers.probed
        )  # one that goes on with the old weights
        versions = [update.version] * 2
        return Loaded(update.version, [Completion([1, 2], [-float(kept)] * 2, versions, "length")])

    def play(self, jobs: list[Sequence[Attempt]]) -> None:
        self.played += jobs
        for job in jobs:
            for one in job:
                with self.lock:
                    self.news[0].append(Begun(one.request_id, self.version))
                if not self.workers.hold:
                    self.end(one)

    def end(self, one: Attempt) -> None:
        name = f"{one.group_id}#{one.number}@{self.name}"
        with self.lock:
            self.news[1].append(
                PlayedAttempt(one.request_id, np.frombuffer(name.encode(), dtype=np.uint8))
            )

    def cancel(self, names: list[str]) -> None:
        self.workers.cancelled += names


class Mute:
    """Answers later, in the test's hand."""

    def __init__(self, late: Future[Any]) -> None:
        self.late = late

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self.late

    def kill(self) -> None: ...


class Workers:
    def __init__(self, hold: bool = False, places: int = 4) -> None:
        self.hold, self.places = hold, places
        self.broken: RLFlowError | None = None
        self.unreadable = False
        self.probed: set[str] | None = None  # those who keep old weights; None: they hash theirs
        self.made: list[Worker] = []
        self.loads: list[tuple[str, int]] = []
        self.cancelled: list[str] = []

    def __call__(self, name: str) -> Worker:
        self.made.append(Worker(name, self))
        return self.made[-1]


def pool_of(workers: Workers, count: int = 2, limits: PoolLimits = LIMITS) -> closing[WorkerPool]:
    return closing(WorkerPool(workers, count, trajectory, limits))


def test_who_waits_for_all_workers_hears_which_are_not_up() -> None:
    workers, limits = Workers(), replace(LIMITS, place_s=0.15, start_s=0.15)

    def launch(name: str) -> Worker:
        worker = workers(name)
        if name == "1":
            worker.stopped.set()
            threading.Timer(late_s, worker.stopped.clear).start()
        return worker

    late_s = 0.1
    with closing(WorkerPool(launch, 2, trajectory, PoolLimits())) as pool:
        await_all(pool)
        assert pool.counts()["workers/up"] == 2
    late_s = 1.0
    with closing(WorkerPool(launch, 2, trajectory, limits)) as pool:
        with pytest.raises(RolloutError, match=r"must all be up .* not up after 0.3 s: 1; the log"):
            await_all(pool)


def start(player: RemotePlayer, count: int, name: str = "a", of_a_group: int = 1) -> None:
    player.start(
        [attempt(f"{name}{number}", f"g{number // of_a_group}") for number in range(count)]
    )


def heard(player: RemotePlayer, enough: Callable[[list[Event]], bool]) -> list[Event]:
    found: list[Event] = []
    until(lambda: enough(found) or found.extend(player.events(0.05)))
    return found


def ends(found: list[Event]) -> list[str]:
    return [item.request_id for item in found if isinstance(item, Ended)]


def losses(found: list[Event]) -> list[str]:
    return [item.request_id for item in found if isinstance(item, Lost)]


def test_every_attempt_ends_once_and_says_on_which_worker_it_began() -> None:
    workers = Workers()
    with pool_of(workers) as pool:
        player = RemotePlayer(pool)
        start(player, 20, of_a_group=4)
        found = heard(player, lambda found: len(ends(found)) == 20)
    assert sorted(ends(found)) == sorted(f"a{number}" for number in range(20))
    assert {item.worker for item in found if isinstance(item, Begun)} == {"0", "1"}


def test_attempts_of_a_group_stay_together_and_no_worker_gets_more_than_it_has_room_for() -> None:
    workers = Workers(hold=True, places=4)
    with pool_of(workers) as pool:
        until(lambda: len(workers.made) == 2 and pool.counts()["workers/up"] == 2)
        player = RemotePlayer(pool)
        start(player, 12, of_a_group=4)
        heard(player, lambda found: len(found) == 8)
        given = [
            [one.request_id for job in worker.played for one in job] for worker in workers.made
        ]
        assert sorted(given) == [["a0", "a1", "a2", "a3"], ["a4", "a5", "a6", "a7"]]
        for play in workers.made[0].played[:4]:
            workers.made[0].end(play[0])
        heard(player, lambda found: len(found) == 8)  # four ends, four begin in their places
        assert player.events(0.1) == []


@pytest.mark.parametrize("how", ["dies", "hangs", "is late"])
def test_a_worker_that_fails_loses_its_attempts_and_another_process_takes_its_place(
    how: str,
) -> None:
    workers = Workers(hold=True)
    limits = replace(LIMITS, attempt_s=0.5) if how == "is late" else LIMITS
    with pool_of(workers, limits=limits) as pool:
        player = RemotePlayer(pool)
        start(player, 8, of_a_group=4)
        begun = heard(player, lambda found: len(found) == 8)
        victim, other = workers.made[:2]
        mine = {
            item.request_id
            for item in begun
            if isinstance(item, Begun) and item.worker == victim.name
        }
        for play in other.played:
            other.end(play[0])
        found = heard(player, lambda found: len(ends(found)) == 4)
        if how == "dies":
            victim.dead = True
        elif how == "hangs":
            victim.stopped.set()
        found += heard(player, lambda found: len(losses(found)) == 4)
        assert set(losses(found)) == mine and not mine & set(ends(found))
        assert victim.dead  # whatever it was, it is killed
        victim.stopped.clear()
        for play in victim.played:
            victim.end(play[0])  # a late result
        until(lambda: len(workers.made) >= 3)
        workers.hold = False
        player.start([attempt("b")])
        assert ends(heard(player, lambda found: len(ends(found)) == 1)) == ["b"]
        counts = pool.counts()
    assert counts["workers/attempts_lost"] == 4 and counts["workers/restarts"] >= 1


@pytest.mark.parametrize("replaced", [True, False])
def test_a_failed_call_fails_the_process_that_was_called_and_none_after_it(replaced: bool) -> None:
    async def fails() -> bool:
        late, slot = Future[Any](), WorkerSlot("0")
        slot.handle, slot.broken = Mute(late), asyncio.get_running_loop().create_future()
        slot.play([[attempt("a")]])
        if replaced:
            slot.broken = asyncio.get_running_loop().create_future()
        late.set_exception(ActorDied("its process died"))
        await asyncio.sleep(0.01)
        return slot.broken.done() and slot.broken.exception() is not None

    assert asyncio.run(fails()) is not replaced


def test_reads_of_weights_are_counted_and_whether_they_were_deltas() -> None:
    with pool_of(Workers()) as pool:
        until(lambda: pool.counts()["workers/up"] == 2)
        assert "sync/mib" not in pool.counts()
        for version in (1, 2):
            pool.update(Update(offer(version)))
            player = RemotePlayer(pool)
            start(player, 8, f"{version}/")
            heard(player, lambda found: len(ends(found)) == 8)
            until(lambda: all(slot.version == version for slot in pool._slots))  # noqa: B023 -- called here
            counts = pool.counts()
            assert (counts["sync/mib"], counts["sync/delta_share"]) == (6.0, version - 1.0)
            assert (counts["time/sync_read_s"], counts["time/sync_load_s"]) == (0.5, 0.25)


def test_a_worker_gets_no_attempt_before_it_has_the_newest_weights_nor_does_a_new_one() -> None:
    workers = Workers()
    with pool_of(workers) as pool:
        until(lambda: pool.counts()["workers/up"] == 2)
        for version in (1, 2, 5):
            pool.update(Update(offer(version)))
            player = RemotePlayer(pool)
            start(player, 8, f"{version}/")
            found = heard(player, lambda found: len(ends(found)) == 8)
            assert {item.version for item in found if isinstance(item, Begun)} == {version}
        workers.made[0].dead = True
        until(lambda: len(workers.made) == 3)
        until(lambda: workers.made[2].version == 5)
        player.start([attempt("x")])
        heard(player, lambda found: len(ends(found)) == 1)


def test_weights_that_cannot_be_read_cost_the_worker_its_place_and_at_last_the_run() -> None:
    workers = Workers()
    workers.unreadable = True
    with pool_of(workers) as pool:
        pool.update(Update(offer(1)))
        player = RemotePlayer(pool)
        player.start([attempt("a")])
        with pytest.raises(
            RolloutError,
            match=r"not one of 2 workers has been up .*a tensor is not what was published",
        ):
            heard(player, lambda _: False)
    assert len(workers.made) == 2 * LIMITS.failures


def test_a_worker_that_keeps_failing_is_quarantined_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = Workers()
    with pool_of(workers, limits=replace(LIMITS, start_s=30.0)) as pool:
        until(lambda: pool.counts()["workers/up"] == 2)

        def quarantined() -> bool:
            for one in workers.made:
                one.dead = one.dead or one.name == "0"
            return "is not started again" in caplog.text

        until(quarantined)
        player = RemotePlayer(pool)
        start(player, 8)
        found = heard(player, lambda found: len(ends(found)) == 8)
        assert {item.worker for item in found if isinstance(item, Begun)} == {"1"}
        assert "failed 3 times without an attempt that ended" in caplog.text


def test_a_driver_that_was_stopped_for_an_hour_takes_no_attempt_as_late() -> None:
    workers, slept_s = Workers(hold=True), [0.0]
    with closing(
        WorkerPool(workers, 1, trajectory, LIMITS, clock=lambda: time.monotonic() + slept_s[0])
    ) as pool:
        player = RemotePlayer(pool)
        start(player, 1)
        until(lambda: workers.made and workers.made[0].played)
        slept_s[0] = 3600.0
        time.sleep(1.0)
        workers.made[0].end(attempt("a0"))
        assert (
            len(ends(heard(player, lambda found: ends(found) != []))) == 1
            and len(workers.made) == 1
        )


def test_a_mistake_of_the_set_up_ends_everything_at_once() -> None:
    workers = Workers()
    workers.broken = ConfigError("environment.name: no such thing")
    with pool_of(workers) as pool, pytest.raises(ConfigError, match="no such thing"):
        pool.first_facts()


def test_what_is_played_together_ends_together_or_is_lost_together() -> None:
    workers = Workers(
        hold=True, places=2
    )  # fewer places than attempts: those that belong together stay so
    with pool_of(workers) as pool:
        player = RemotePlayer(pool, together=True)
        player.start([attempt(f"a{number}") for number in range(5)])
        heard(player, lambda found: len(found) == 5)
        (first,) = [one for one in workers.made if one.played]
        first.end(first.played[0][0])
        assert not ends(player.events(0.2))
        first.dead = True
        found = heard(player, lambda found: len(losses(found)) == 5)
        assert not ends(found)
        player.start([attempt(f"a{number}") for number in range(5)])
        heard(player, lambda found: len(found) == 5)
        second = next(one for one in workers.made if one.played and one is not first)
        for one in second.played[0]:
            second.end(one)
        assert ends(heard(player, lambda found: len(found) == 5)) == [
            f"a{number}" for number in range(5)
        ]


def test_what_is_cancelled_is_not_heard_of_and_makes_room() -> None:
    workers = Workers(hold=True, places=1)
    with pool_of(workers, count=1) as pool:
        player, other = RemotePlayer(pool), RemotePlayer(pool)
        player.start([attempt("a")])
        heard(player, lambda found: len(found) == 1)
        player.start([attempt("b")])
        other.start(
            [replace(attempt("evaluated"), temperature=0.0, priority=0)]
        )  # before training's
        player.cancel(["a"])
        heard(other, lambda found: len(found) == 1)
        until(lambda: workers.cancelled == ["a"])
        assert workers.made[0].played[-1][0].temperature == 0.0
        player.close()
        other.close()
        assert player.events(0.1) == [] and sorted(workers.cancelled) == ["a", "evaluated"]


def test_groups_come_whole_although_workers_die_under_them() -> None:
    workers = Workers(hold=True, places=8)
    with pool_of(workers) as pool:
        names = iter("gh")
        groups = Groups(
            RemotePlayer(pool), played_as, lambda step, task: next(names), lambda count: [Task("t", "?")] * count,
            Pacing(2, ANY_AGE), Terms(4, 0.0, 20.0),
        )  # fmt: skip
        threading.Timer(0.3, lambda: setattr(workers.made[0], "dead", True)).start()

        def end_all() -> None:
            workers.hold = False
            for one in workers.made[1].played:
                workers.made[1].end(one[0])

        threading.Timer(0.6, end_all).start()
        found = groups.step(0)
    assert [group.id for group in found] == ["g", "h"]
    assert all([one.attempt for one in group.trajectories] == [0, 1, 2, 3] for group in found)
    assert not groups.in_flight


def played_as(task: Task, group: str, number: int, request: str) -> Attempt:
    return attempt(request, group, number)


class Policy:
    """A trainer whose log-probs are minus its version, and the probe that it scores."""

    def __init__(self) -> None:
        self.version, self.scored = 0, list[tuple[int, int]]()  # (thread, rows)
        self.probe = WeightProbe([[3]], self.score, max_tokens=2)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        self.scored.append((threading.get_ident(), len(rows)))
        return [[-float(self.version)] * len(row) for row in rows]

    def sync(self, pool: WorkerPool, waits: bool = True) -> None:
        self.version += 1
        pool.update(Update(offer(self.version), questions=self.probe.questions), self.probe)
        if waits:
            pool.await_passed(5.0)


def probed(*stale: str, **options: Any) -> Workers:
    workers = Workers(**options)
    workers.probed = set(stale)
    return workers


def test_workers_that_cannot_hash_their_weights_are_scored_together_in_the_thread_that_syncs() -> (
    None
):
    workers, policy = probed(), Policy()
    with pool_of(workers) as pool:
        until(lambda: pool.counts()["workers/up"] == 2)
        for _ in range(2):
            policy.sync(pool)
            player = RemotePlayer(pool)
            start(player, 8, f"{policy.version}/")
            found = heard(player, lambda found: len(ends(found)) == 8)
            assert {item.version for item in found if isinstance(item, Begun)} == {policy.version}
    assert (
        policy.scored == [(threading.get_ident(), 1)] * 2
    )  # equal answers of both, once per version


def test_no_attempt_is_given_or_heard_of_before_its_weights_have_passed() -> None:
    workers, policy = probed(hold=True, places=1), Policy()
    with pool_of(workers, count=1) as pool:
        until(lambda: pool.counts()["workers/up"] == 1)
        player = RemotePlayer(pool)
        player.start([attempt("a")])
        heard(player, lambda found: len(found) == 1)
        player.start([attempt("b")])
        policy.sync(pool, waits=False)  # the trainer does not wait, and scores nothing
        until(lambda: workers.made[0].version == 1)
        workers.made[0].end(workers.made[0].played[0][0])  # under weights that nobody has verified
        time.sleep(0.3)
        assert (
            not player._inbox._items.qsize()
            and len(workers.made[0].played) == 1
            and not policy.scored
        )
        found = heard(
            player, lambda found: len(found) == 2
        )  # who asks for news has a trainer that is free
        assert ends(found) == ["a"] and isinstance(found[1], Begun) and len(policy.scored) == 1


def test_one_worker_with_old_weights_loses_its_place_and_alone_it_ends_the_run() -> None:
    workers, policy = probed("0", hold=True), Policy()
    with pool_of(workers) as pool:
        until(lambda: pool.counts()["workers/up"] == 2)
        player = RemotePlayer(pool)
        start(player, 8, of_a_group=4)
        begun = heard(player, lambda found: len(found) == 8)
        policy.sync(pool)
        assert workers.made[0].dead != workers.made[1].dead
        found = heard(player, lambda found: len(losses(found)) == 4)
        assert set(losses(found)) == {
            one.request_id for one in begun if isinstance(one, Begun) and one.worker == "0"
        }
        workers.probed = set()
        until(lambda: len(workers.made) == 3)
        heard(
            player, lambda _: workers.made[2].version == 1
        )  # one that joins later, which the wait for news compares
        until(lambda: pool.counts()["workers/up"] == 2)
        workers.probed = {"0", "1"}
        with pytest.raises(
            RolloutError,
            match="after version 2 engine and trainer differ by 1 nats on a token of the probe",
        ):
            policy.sync(pool)


def test_what_was_played_with_weights_that_were_never_compared_is_lost() -> None:
    workers, policy = probed(hold=True), Policy()
    with pool_of(workers, count=1) as pool:
        until(lambda: pool.counts()["workers/up"] == 1)
        player = RemotePlayer(pool)
        player.start([attempt("a")])
        heard(player, lambda found: len(found) == 1)
        policy.sync(pool, waits=False)
        until(lambda: pool._slots[0].loaded is not None)
        workers.made[0].end(workers.made[0].played[0][0])
        policy.sync(pool)
        assert losses(heard(player, lambda found: bool(found))) == ["a"]
        player.start([attempt("b")])
        heard(player, lambda found: len(found) == 1)
