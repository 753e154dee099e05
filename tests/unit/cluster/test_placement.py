"""Which rank and engine get which GPU, by hand; and what cannot be is refused before anything starts."""

from __future__ import annotations

import os
import random

import pytest

from rlflow.cluster import placement
from rlflow.cluster.placement import interface, prepare_process
from rlflow.config.schema import ClusterSection, RunConfig, load_config
from rlflow.devices.gpu_plan import Bundle, GpuPlan, plan
from rlflow.errors import ConfigError
from rlflow.rollout.engine_facts import EngineFacts, engine_facts
from rlflow.run import gpus
from rlflow.run.gpus import check_gpus, engine_gpus, gpu_demand

ONE = [Bundle("10.0.0.1", str(number)) for number in range(4)]
TWO = [Bundle(node, str(number)) for node in ("10.0.0.2", "10.0.0.10") for number in range(4)]


def placing(config: RunConfig) -> tuple[ClusterSection, EngineFacts]:
    return config.cluster, engine_facts(config.rollout.engine)


def seen(found: GpuPlan) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine."""
    return [",".join(bundle.gpu for bundle in engine) for engine in found.engines]


@pytest.mark.parametrize(
    ("ranks", "engines", "each", "shared", "expected"),
    [
        (4, 4, 1, True, ["0", "1", "2", "3"]),
        (4, 2, 2, True, ["0,1", "2,3"]),
        (2, 1, 4, True, ["0,1,2,3"]),  # an engine may have more GPUs than the ranks
        (2, 2, 1, False, ["2", "3"]),
        (2, 3, 2, True, ["0,1", "2,3", "0,1"]),  # where GPUs are used up, they begin again
        (1, 0, 1, True, []),
    ],
)
def test_engine_i_has_the_gpus_from_i_times_its_size_on(
    ranks: int, engines: int, each: int, shared: bool, expected: list[str]
) -> None:
    found = plan(ONE, ranks, engines, each, shared, again=True)
    assert seen(found) == expected
    assert [bundle.gpu for bundle in found.bundles[:ranks]] == ["0", "1", "2", "3"][:ranks]


def test_the_order_of_machines_is_that_of_their_addresses_as_numbers() -> None:
    mixed = random.Random(0).sample(TWO, len(TWO))
    assert sorted(mixed, key=lambda bundle: bundle.order) == TWO


def test_the_table_says_who_is_where() -> None:
    found = plan(ONE, 2, 2, 2, True, False).table([3 << 30, 1 << 29])
    assert [line.split() for line in found] == [
        ["node", "GPU", "rank", "engine", "GiB"],
        ["10.0.0.1", "0", "0", "0", "3.0"],
        ["10.0.0.1", "1", "1", "0", "0.5"],
        ["10.0.0.1", "2", "-", "1", "?"],
        ["10.0.0.1", "3", "-", "1", "?"],
    ]
    assert len({len(line) for line in found}) == 1


@pytest.mark.parametrize(
    ("bundles", "ranks", "engines", "each", "told"),
    [
        (ONE, 5, 0, 1, r"5 ranks on 4 GPUs: .* \(NCCL refuses two ranks on one\)"),
        (ONE, 2, 3, 2, "2 ranks and 3 engines of 2 on 4 GPUs"),
        (ONE, 2, 1, 5, "2 ranks and 1 engines of 5 on 4 GPUs"),
        (TWO, 6, 2, 3, "engine 1 would lie on 10.0.0.10 and 10.0.0.2; .* found 3"),
    ],
)
def test_what_cannot_be_is_refused(
    bundles: list[Bundle], ranks: int, engines: int, each: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(bundles, ranks, engines, each, True, again=False)


def config(**cluster: object) -> RunConfig:
    values = [f"cluster.{name}={value}" for name, value in cluster.items()]
    return load_config(None, ["environment.name=none", "rollout.engine.name=vllm", *values])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 2, "gpus_per_rank": 0.5}, "found 0.5 for 2 ranks: two ranks cannot share a GPU"),
        ({"ranks": 2, "gpus_per_rank": 2}, "found 2, expected at most 1"),
        (
            {"ranks": 2, "gpus_per_rank": 0.7, "rollout_workers": 2},
            "found 0.7: a rank and a rollout worker",
        ),
        ({"ranks": 5, "gpus_per_rank": 1}, "5 ranks and 1 engines of 1 on 4 GPUs"),
        (
            {"ranks": 2, "gpus_per_rank": 1, "rollout_workers": 3},
            "2 ranks and 3 engines of 1 on 4 GPUs",
        ),
        (
            {"gpus_per_rank": 0.5, "rollout_workers": 2},
            "cluster.ranks: found 0 .* Set cluster.ranks=1",
        ),
        ({"gpus_per_rank": 1, "rollout_workers": 2, "address": "a:1"}, "cluster.ranks: found 0 "),
    ],
)
def test_a_run_that_cannot_be_placed_is_one_error(
    options: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ONE)
    with pytest.raises(ConfigError, match=told):
        check_gpus(*placing(config(**options)))


@pytest.mark.parametrize(
    ("options", "shared", "bundles"),
    [
        ({"ranks": 4, "gpus_per_rank": 1}, True, 4),
        ({"ranks": 4, "gpus_per_rank": 0.5, "rollout_workers": 4}, True, 4),
        ({"ranks": 2, "gpus_per_rank": 1, "rollout_workers": 2}, False, 4),
        ({"ranks": 1, "gpus_per_rank": 1, "rollout_workers": 3}, False, 4),
    ],
)
def test_a_fraction_puts_workers_beside_the_ranks(
    options: dict[str, object], shared: bool, bundles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ONE)
    check_gpus(*placing(config(**options)))
    demand = gpu_demand(*placing(config(**options)))
    assert (demand.shared, demand.most) == (shared, bundles)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)


def test_between_machines_collectives_take_the_interface_of_the_nodes_address(
    variables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "own_node", lambda: "127.0.0.1")
    prepare_process("2,3", local=False, one_connection=True)
    assert (
        os.environ["GLOO_SOCKET_IFNAME"]
        == os.environ["NCCL_SOCKET_IFNAME"]
        == interface("127.0.0.1")
        == "lo"
    )
    assert (
        os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    )
    assert interface("203.0.113.7") is None


def test_what_the_user_has_set_of_interfaces_stays_and_nothing_else_is_set(
    variables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "own_node", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    prepare_process(None, local=False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0" and os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"} & set(os.environ)


class Placed:
    """A placement on these, as Ray would have made it."""

    def __init__(self, *bundles: Bundle) -> None:
        self.bundles = bundles


@pytest.mark.parametrize(
    ("driver", "engines"), [("10.0.0.2", 4), ("10.0.0.2", 5), ("10.0.0.99", 1)]
)
def test_engines_of_this_process_are_on_its_machine_or_nowhere(
    driver: str, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "own_node", lambda: driver)
    asked = load_config(None, ["environment.name=none", f"rollout.engine={{name: vllm, engines: {engines}}}",
                               "cluster={ranks: 8, gpus_per_rank: 1, address: auto}"])  # fmt: skip
    if (driver, engines) == ("10.0.0.2", 4):
        assert engine_gpus(*placing(asked), Placed(*TWO)) == [["0"], ["1"], ["2"], ["3"]]  # type: ignore[arg-type]
        return
    with pytest.raises(
        ConfigError, match=rf"need GPUs of {driver} alone, .* cluster.rollout_workers={engines}, "
    ):
        engine_gpus(*placing(asked), Placed(*TWO))  # type: ignore[arg-type]
