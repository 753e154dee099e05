"""GPUs and cores of trainer ranks, and of engines beside them, reserved with Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil

from rlflow.cluster.session import RaySession, connect
from rlflow.devices.gpu_plan import Bundle
from rlflow.errors import ConfigError

PLACEMENT_TIMEOUT_S = 120.0
LOOK_GPUS = 0.001  # of a bundle, for a moment


class Placement:
    """Ray, and a bundle of its resources per rank, reserved until `close`: one GPU each, or CPU
    cores alone. `bundles`: where they are, in order.

    address None starts Ray on this machine. cpus: cores of a bundle. more_cpus: of a Ray that is
    started here, beside them; options: of ray.init for it."""

    def __init__(
        self,
        address: str | None,
        count: int,
        *,
        cpus: int,
        gpus: bool,
        more_cpus: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.local = address is None
        self._group: Any = None
        self._session: RaySession | None = connect(address, count * cpus + more_cpus, options)
        try:
            self._reserve(count, {"CPU": cpus, **({"GPU": 1} if gpus else {})})
            found = self._look(count) if gpus else self._nodes(count)
        except BaseException:  # Ctrl-C included: no process may be left behind
            self.close()
            raise
        here = own_node()  # first: only there the driver can start engines
        placed = sorted(enumerate(found), key=lambda one: (one[1].node != here, one[1].order))
        self._order = [bundle for bundle, _ in placed]
        self.bundles = tuple(place for _, place in placed)

    def options(self, index: int, cpus: float, gpus: float = 0.0) -> dict[str, Any]:
        """Of an actor, for the place of that index, of which it takes so much."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._order[index]
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Gives the bundles back, and stops Ray (or leaves the cluster) where this connected to it.
        May be called twice."""
        import ray

        group, session = self._group, self._session
        self._group = self._session = None
        if group is not None and ray.is_initialized():  # else the user was faster
            ray.util.remove_placement_group(group)
        if session is not None:
            session.close()

    def _reserve(self, count: int, bundle: dict[str, int]) -> None:
        """Close together, as far as there is room."""
        import ray

        self._group = ray.util.placement_group([bundle] * count, strategy="PACK")
        if not self._group.wait(timeout_seconds=PLACEMENT_TIMEOUT_S):
            there = ray.cluster_resources().items()
            found = {name: amount for name, amount in there if name in bundle}
            raise ConfigError(
                f"cluster: no room for {count} ranks with {bundle} each within "
                f"{PLACEMENT_TIMEOUT_S:.0f} s; Ray has {found} in all; lower cluster.ranks, "
                "threads_per_rank or gpus_per_rank, or add nodes"
            )

    def _nodes(self, count: int) -> list[Bundle]:
        """The machine of each bundle."""
        import ray

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [Bundle(addresses[nodes[bundle]]) for bundle in range(count)]

    def _look(self, count: int) -> list[Bundle]:
        """The machine and GPU of each bundle, as a process in it sees them."""
        import ray

        self._order = list(range(count))
        asked = [
            ray.remote(_look).options(**self.options(bundle, 0, LOOK_GPUS)).remote()
            for bundle in range(count)
        ]
        try:
            return ray.get(asked, timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"cluster: waited {PLACEMENT_TIMEOUT_S:.0f} s for {count} processes that say which "
                "GPU they see; `ray status` tells what holds them up"
            ) from None


def _look() -> Bundle:
    import ray

    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return Bundle(own_node(), gpu)


def own_node() -> str:
    """The address of this machine, as Ray has it."""
    import ray

    return ray.util.get_node_ip_address()


def prepare_process(gpus: str | None, local: bool, one_connection: bool = False) -> None:
    """Sets what libraries read from the environment when they are first used.

    gpus: to be seen; None: those that Ray has chosen. local: all processes of the run are on this
    machine; else gloo and NCCL get the interface of the address by which others reach it: by
    themselves they take what the host name resolves to. one_connection: of the device, so that
    collectives start in the order of their calls, before what is computed beside them, as Megatron
    needs it to overlap them."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if local:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif (name := interface(own_node())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    if one_connection:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def interface(address: str) -> str | None:
    """The network interface of this machine with that address."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    return None
