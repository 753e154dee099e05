"""The ordered session: what each of the five calls measures, and for how long at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MINUTES = {1: 9.0, 2: 8.0, 3: 9.0, 4: 8.0, 5: 8.0}
"""Of a call; what has not begun by then is left out."""
LIMIT_S = 120.0  # of a case
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "padded": {},
    "recompute full": {"packing": True, "recompute": "full"},
    "recompute selective": {"packing": True, "recompute": "selective"},
    "release_gradients": {"packing": True, "release_gradients": True},
    "distributed_optimizer": {"packing": True, "distributed_optimizer": True},
    "HostAdamW": {"packing": True, "optimizer": {"name": "adamw", "offload": True}},
    "offload_snapshots": {"packing": True, "offload_snapshots": True},
    "LoRA": {"packing": True, "lora": {"rank": 8}},
    "critic": {"packing": True, "values": True},
}
"""Ways to train that give the same numbers, adapters and critic apart."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "HostAdamW": {"optimizer": {"name": "adamw", "offload": True}},
    "distributed_optimizer": {"distributed_optimizer": True},
    "LoRA": {"lora": {"rank": 8}},
}
FUSED = {"apply_rope_fusion": True, "bias_activation_fusion": True}
UNFUSED = {"apply_rope_fusion": False, "bias_activation_fusion": False}


@dataclass(frozen=True)
class Case:
    """One measurement, in a process of its own. place: `module:function`, called with a Report
    and the options."""

    name: str
    place: str
    options: dict[str, Any] = field(default_factory=dict)
    limit_s: float = LIMIT_S


def plan(part: int) -> list[Case]:
    """The cases of a call, the most telling first: the last are left out where time runs out."""
    return {1: trainer_is_right, 2: engine_is_right, 3: speed, 4: transformer_engine, 5: the_rest}[
        part
    ]()


def trainer_is_right() -> list[Case]:
    return [
        Case("machine", "first:machine", limit_s=90),
        Case("collectives", "first:collectives", limit_s=60),
        *(Case(name, "parity:parity", options, 90) for name, options in VARIANTS.items()),
        *(
            Case(f"resume {name}", "parity:resume", options, 90)
            for name, options in OPTIMIZERS.items()
        ),
        Case("resume bfloat16", "parity:resume", {"dtype": "bfloat16"}, 90),
        Case("checkpoint to the CPU and back", "parity:travel"),
        Case("doctor", "first:doctor", limit_s=60),
        Case("tests", "first:tests", limit_s=200),
    ]


def engine_is_right() -> list[Case]:
    gaps = [
        {"norm": norm, "temperature": warmth}
        for norm, warmth in ((8.0, 1.0), (16.0, 1.0), (16.0, 0.7))
    ]
    return [
        Case("graphs", "engines:graphs"),
        Case("sleep", "engines:sleep"),
        Case("weights by IPC", "handles:exchange"),
        *(Case(f"gap {norm_of(options)}", "engines:gap", options) for options in gaps),
    ]


def norm_of(options: dict[str, Any]) -> str:
    return f"norm {options['norm']:g} temperature {options['temperature']:g}"


def speed() -> list[Case]:
    none: dict[str, Any] = {"recompute": "none"}
    return [
        Case("matrix rate", "speed:matrix"),
        Case("train 3B", "speed:train", none),
        Case("profile 3B", "speed:profile", none),
        Case("train 3B recompute full", "speed:train", {"recompute": "full"}),
        Case("train 3B recompute selective", "speed:train", {"recompute": "selective"}),
        Case("train 3B row by row", "speed:train", {**none, "layers": "rows"}),
        Case("weights out", "speed:weights_out"),
        Case("AdamW 1.5B", "speed:host_adam"),
        Case("train 3B 16k tokens", "speed:train", {"recompute": "full", "tokens": 16384}),
        Case("head and one layer", "speed:train", {**none, "model": "3B, one layer"}),
        Case("train 3B logits 128 MiB", "speed:train", {**none, "logits_chunk_mib": 128.0}),
        Case("train 1.5B", "speed:train", {**none, "model": "1.5B"}),
        Case("train 0.5B", "speed:train", {**none, "model": "0.5B"}),
        Case("train 3B LoRA", "speed:train", {**none, "lora": {"rank": 64}}),
    ]


def transformer_engine() -> list[Case]:
    te: dict[str, Any] = {"layers": "te"}
    checked = (
        "packed",
        "padded",
        "recompute selective",
        "distributed_optimizer",
        "HostAdamW",
        "LoRA",
        "critic",
    )
    bf16 = {"dtypes": ["bfloat16"]}  # its attention takes no float32
    return [
        *(
            Case(f"TE {name}", "parity:parity", {**te, **bf16, **VARIANTS[name]}, 90)
            for name in checked[:2]
        ),
        Case("TE resume", "parity:resume", {**te, "dtype": "bfloat16"}, 90),
        Case("TE train 3B", "speed:train", te),
        Case("TE train 3B fused", "speed:train", {**te, "fields": FUSED}),
        Case("TE train 3B unfused", "speed:train", {**te, "fields": UNFUSED}),
        Case("TE train 3B fp8", "speed:train", {**te, "fp8": "tensorwise"}),
        Case("TE profile 3B", "speed:profile", te),
        *(
            Case(f"TE {name}", "parity:parity", {**te, **bf16, **VARIANTS[name]}, 90)
            for name in checked[2:]
        ),
    ]


def the_rest() -> list[Case]:
    return [
        Case("vLLM gap and sync", "engines:gap", {"engine": "vllm", "norm": 8.0}, 180),
        Case("vLLM decode 3B", "engines:decode", {"engine": "vllm"}, 180),
        Case("vLLM's benchmark 3B", "engines:vllm_benchmark", {}, 180),
        Case("embedded decode 3B", "engines:decode", {"engine": "embedded"}),
        Case("retrieval torch", "speed:retrieve", {"index": "torch"}),
        Case("retrieval faiss", "speed:retrieve", {"index": "faiss"}),
    ]
