"""Ranks and rollout workers on four GPUs that only Ray believes in: all see what the table says."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlflow.cluster.placement import Placement
from rlflow.cluster.session import connect
from rlflow.cluster.slots import PoolLimits
from rlflow.cluster.trainer import start_ranks
from rlflow.cluster.worker_actors import RayWorkers
from rlflow.devices.gpu_plan import plan
from rlflow.rollout.workers import WorkerFacts, WorkerNews
from tests.waiting import until

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]


class SeesGpus:
    """A worker that reports which GPUs its process sees."""

    def __init__(self, name: str, threads: int, products: Any) -> None:
        self.name = name

    def build(self) -> WorkerFacts:
        return WorkerFacts(None, 1, os.getpid())

    def look(self) -> WorkerNews:
        time.sleep(0.25)
        return WorkerNews()

    def report(self) -> dict[str, float]:
        return {f"{self.name}: {os.environ['CUDA_VISIBLE_DEVICES']}": 1.0}


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    session = connect(None, cpus=8, options={"num_gpus": 4})
    assert session is not None
    yield
    session.close()


def seen_by_ranks(placement: Placement, ranks: int, share: float) -> list[str]:
    import ray

    actors = start_ranks(placement, ranks, 1, share, False)
    try:
        look = [
            actor.__ray_call__.remote(lambda rank: os.environ["CUDA_VISIBLE_DEVICES"])
            for actor in actors
        ]
        return ray.get(look)
    finally:
        for actor in actors:
            ray.kill(actor)


def seen_by_workers(count: int, each: int, share: float, placement: Placement | None) -> set[str]:
    workers = RayWorkers(
        SeesGpus, count, read=lambda _: pytest.fail("nothing is played"), limits=PoolLimits(), address=None,
        threads=1, gpus=share, each=each, cpus=8, placement=placement,
    )  # fmt: skip
    try:
        if placement is None:
            until(lambda: workers.pool.counts()["workers/up"] == count)
        return {name for report in workers.pool.reports() for name in report}
    finally:
        workers.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "engines", "each"),
    [
        (4, 4, 1),
        (4, 2, 2),
        (2, 1, 2),
    ],
)
def test_ranks_and_workers_share_gpus_as_the_table_says(
    four_gpus: None, ranks: int, engines: int, each: int
) -> None:
    placement = Placement(None, ranks, cpus=2, gpus=True)
    try:
        table = plan(placement.bundles, ranks, engines, each, shared=True, again=False)
        gpus = [bundle.gpu for bundle in table.bundles]
        assert seen_by_ranks(placement, ranks, 0.4) == gpus == [str(gpu) for gpu in range(ranks)]
        expected = {
            f"{i}: {','.join(one.gpu for one in found)}" for i, found in enumerate(table.engines)
        }
        assert seen_by_workers(engines, each, 0.4, placement) == expected
    finally:
        placement.close()


@pytest.mark.slow
def test_workers_without_the_ranks_gpus_have_others(four_gpus: None) -> None:
    placement = Placement(None, 2, cpus=1, gpus=True)
    try:
        taken = {bundle.gpu for bundle in placement.bundles}
        (told,) = seen_by_workers(1, 2, 1.0, None)
        others = set(told.removeprefix("0: ").split(","))
        assert len(others) == 2 and not others & taken
    finally:
        placement.close()
