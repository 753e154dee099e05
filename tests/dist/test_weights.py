"""Weights through Ray's object store: other processes read them, and whoever is killed leaves nothing in it."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rlflow.cluster import object_store
from rlflow.cluster.object_store import check_room, put, room_for, store_bytes
from rlflow.cluster.session import connect
from rlflow.errors import RolloutError
from rlflow.models.huggingface import digest
from rlflow.rollout.weights import Offer, WeightPublisher, WeightReader
from rlflow.rollout.workers import Update
from tests.unit.rollout.test_weights import made, trained
from tests.waiting import until

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    session = connect(None, cpus=2)
    import ray  # only now: it reads at its import what `connect` has it listen on

    yield ray
    assert session is not None
    session.close()


class Elsewhere:
    """Rollout workers' readers, and a publisher, in a process of their own."""

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT))
        self.readers: dict[str, WeightReader] = {}
        self.held: list[Any] = []

    def read(self, update: Update, name: str = "one") -> tuple[str, int, bool]:
        self.held = [self.readers.setdefault(name, WeightReader()).read(update.offer)]
        (read,) = self.held
        return digest(read.weights), read.bytes, read.delta

    def publish(self) -> Offer:
        self.publisher = WeightPublisher(put)
        return self.publisher.publish(large(1), 1)


@pytest.fixture(scope="module")
def elsewhere(ray: Any) -> Any:
    """It takes seconds to start."""
    return ray.remote(num_cpus=0, max_restarts=0)(Elsewhere).remote()


def used(ray: Any) -> float:
    """MiB of the object store."""
    name = "object_store_memory"
    return (ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)) / MIB


def large(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((16 * MIB,), float(version), dtype=torch.bfloat16))]  # 32 MiB


def test_other_processes_read_what_was_published_whole_or_as_what_changed(
    ray: Any, elsewhere: Any
) -> None:
    publisher = WeightPublisher(put, delta=True)
    for version in (1, 2, 3):
        pairs = trained(version) if version < 3 else made(3)
        offer = publisher.publish(iter(pairs), version)
        found, size, delta = ray.get(elsewhere.read.remote(Update(offer)), timeout=60)
        assert found == offer.digest == digest(pairs) and delta == (version == 2)
        assert size < offer.bytes / 20 if delta else size == offer.bytes
    assert ray.get(elsewhere.read.remote(Update(offer), "late"), timeout=60) == (
        found,
        offer.bytes,
        False,
    )


def test_a_reader_goes_on_with_a_version_that_its_publisher_has_let_go(
    ray: Any, elsewhere: Any
) -> None:
    publisher = WeightPublisher(put)
    offer = publisher.publish(large(1), 1)
    expected, asked = offer.digest, elsewhere.read.remote(Update(offer), "slow")
    del offer
    for version in (2, 3, 4):
        publisher.publish(large(version), version)
    assert ray.get(asked, timeout=60)[0] == expected


def test_a_bucket_that_does_not_come_is_given_up_at_the_deadline(
    elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "GET_S", 0.3)
    slow = elsewhere.__ray_call__.remote(lambda _: time.sleep(1.0))
    told = r"^weights of version 1: waited 0.3 s for 7 MiB from Ray's object store; is the network"
    with pytest.raises(RolloutError, match=told):
        object_store.StoredBucket(slow, 7 * MIB).get("weights of version 1")


def test_who_is_killed_takes_no_memory_and_what_it_published_is_one_error(
    ray: Any, elsewhere: Any
) -> None:
    """Ends the shared process, so it stands last among the tests that use it."""
    until(lambda: used(ray) < 8, 20.0)
    publisher = WeightPublisher(put)
    ray.get(elsewhere.read.remote(Update(publisher.publish(large(1), 1))), timeout=60)
    for version in (2, 3, 4):
        publisher.publish(large(version), version)
    until(lambda: 60 < used(ray) < 70, 20.0)  # the two newest
    lost = ray.get(elsewhere.publish.remote(), timeout=60)
    ray.kill(elsewhere)
    publisher.close()
    until(lambda: used(ray) < 8, 20.0)
    told = r"^weights of version 1, bucket 1 of 1: is no longer in Ray's object store"
    with pytest.raises(RolloutError, match=told):
        for _ in range(100):  # it takes a moment until its end is known
            WeightReader().read(lost)
            time.sleep(0.1)


def test_a_store_that_is_too_small_is_told_once_at_the_start(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_room(store_bytes())
        assert not caplog.records
        check_room(store_bytes() + MIB)
    assert (
        "the smallest object store of Ray here has" in caplog.text and "--shm-size" in caplog.text
    )


@pytest.mark.parametrize(
    ("needed", "free", "expected"),
    [
        (20, 100, {}),
        (50, 100, {"object_store_memory": 50}),
        (50, 40, {"object_store_memory": 38}),
        (50, 20, {}),
    ],
)
def test_a_store_of_rays_own_is_as_large_as_the_weights_need_and_memory_allows(
    needed: int, free: int, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100))
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert room_for(needed) == expected


PUBLISHER = """
import sys, time
sys.path[:0] = [{root!r}]
import torch
from rlflow.cluster.object_store import put
from rlflow.cluster.session import MARK, connect
from rlflow.rollout.weights import WeightPublisher
from rlflow.storage.guard import marked
session = connect(None, cpus=1)
publisher = WeightPublisher(put)
publisher.publish([("a", torch.ones(2**26))], 1)
def endless():
    yield "b", torch.ones(2**25)
    print(*marked(f"{{MARK}}={{session.mark}}"), flush=True)
    time.sleep(60)
publisher.publish(endless(), 2)
"""


@pytest.mark.slow
def test_a_driver_killed_while_it_publishes_leaves_neither_process_nor_memory() -> None:
    free = psutil.disk_usage("/dev/shm").free
    program = PUBLISHER.format(root=str(ROOT))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        family = [int(number) for number in process.stdout.readline().split()]
        held = psutil.disk_usage("/dev/shm").free
        assert family and held < free - 200 * MIB
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(map(psutil.pid_exists, family)), 30.0)
    until(
        lambda: psutil.disk_usage("/dev/shm").free > held + 200 * MIB, 10.0
    )  # others' Rays come and go meanwhile


def test_nothing_is_put_where_ray_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RolloutError, match="Ray was left"):
        WeightPublisher(put).publish(trained(1), 1)
