"""What a run knows of its engine before it makes one: memory, GPUs, how long it starts.

An engine's class, or the function that makes engines, names a subclass of `EngineFacts` in its
attribute `facts`. A run plans by these, not by the engine's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlflow.components import ENGINE
from rlflow.errors import RLFlowError
from rlflow.models.architecture import Architecture

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class EngineLoad:
    """What the memory of an engine follows from.

    parameters: of the whole model. width: bytes of a weight. episodes: in flight at the most.
    max_total_tokens: of an episode; max_prompt_tokens: of its prompt. slack: share of memory that
    allocations take beyond their sizes."""

    model: Architecture
    parameters: int
    width: int
    episodes: int
    max_total_tokens: int
    max_prompt_tokens: int
    slack: float


class EngineFacts:
    """The facts of an engine that says nothing about itself, by the options of `rollout.engine`.

    count: engines that are made. gpus_each: GPUs of one of them."""

    recorded = False
    """Whether it samples nothing: what the environment's tasks hold is imitated."""

    in_process = False
    """Whether it computes in the run's own process, on the first GPU that this sees."""

    own_gpus = False
    """Whether each of its engines is placed on GPUs, of which it takes a share."""

    gpu_share_key = ""
    """The configuration's key of that share."""

    memory_known = False
    """Whether its memory is planned; else it manages its own, and none is counted."""

    takes_adapters = False
    """Whether its engines take adapters alone; else these come merged into whole weights."""

    process = ""
    """What its own processes are called in tables."""

    start_s = 0.0
    """By when it has started, where its option of that name says nothing."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.count = int(options.get("engines", 1))
        self.gpus_each = int(options.get("tensor_parallel") or 1)

    def dtype(self, model_dtype: str) -> str:
        """What it keeps weights in: its own `dtype`, else that of the model."""
        return str(self.options.get("dtype") or model_dtype)

    def start_limit_s(self) -> float:
        """By when it has started."""
        return float(self.options.get("start_s", self.start_s))

    def sleeps(self, on_gpus: bool) -> bool:
        """Whether it gives memory back while the trainer works on the same device."""
        return False

    def memory(self, load: EngineLoad, free: int | None = None) -> dict[str, int]:
        """{part: bytes} of the run's own process while it samples. free: bytes that it finds free;
        None: enough."""
        return {}

    def idle_memory(self, memory: Mapping[str, int], asleep: bool) -> dict[str, int]:
        """What of `memory` stays while the trainer works."""
        return dict(memory)

    def server_memory(self, load: EngineLoad) -> dict[str, int]:
        """{part: bytes} of the processes of one engine together, on CPU cores."""
        return {}

    def gpu_memory(self, size: int) -> tuple[dict[str, int], dict[str, int]]:
        """({part: bytes} of one engine on a GPU of `size` bytes while it samples, the same while
        it sleeps)."""
        return {}, {}

    def transfer_buffer(self, largest_weight: int) -> int:
        """Bytes beside both on a GPU while weights go over; 0: they go by the host."""
        return 0

    def check_installed(self, routes: bool) -> None:
        """Returns where its program is installed on this machine. routes: it has to name experts.
        Raises RLFlowError."""

    def check_devices(self, ranks: int, gpus_per_rank: float) -> None:
        """Returns where engines of this process can be on the devices of this machine, beside so
        many trainer ranks. Raises ConfigError."""


def with_facts(facts: type[EngineFacts]) -> Callable[[T], T]:
    """Marks a function that makes engines with what is known of them."""

    def mark(make: T) -> T:
        make.facts = facts  # type: ignore[attr-defined]
        return make

    return mark


def engine_facts(component: Mapping[str, Any]) -> EngineFacts:
    """The facts of the engine that `rollout.engine` names; the defaults for one that is unknown or
    says nothing about itself."""
    try:
        target = ENGINE.resolve(component["name"], "rollout.engine")
    except RLFlowError:
        return EngineFacts(component)
    facts: type[EngineFacts] = getattr(target, "facts", EngineFacts)
    return facts(component)
