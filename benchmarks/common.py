"""What the benchmarks share: model shapes, and two sides that take turns, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlflow.models.architecture import Architecture, architecture

MIB = 2**20
Figures = dict[str, float]


def qwen2(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int) -> Architecture:
    """A Qwen2 model with tied embeddings."""
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    return architecture(config)


SHAPES = {
    "tiny": qwen2(hidden=128, layers=2, heads=4, groups=2, ffn=384, vocab=4096),
    "8M": qwen2(hidden=384, layers=4, heads=6, groups=2, ffn=1024, vocab=4096),
    "18M": qwen2(hidden=384, layers=7, heads=6, groups=2, ffn=1024, vocab=18432),
    "93M": qwen2(hidden=768, layers=12, heads=12, groups=4, ffn=2048, vocab=22528),
    "0.5B": qwen2(
        hidden=896, layers=24, heads=14, groups=2, ffn=4864, vocab=151936
    ),  # Qwen2.5-0.5B
    "1.5B": qwen2(
        hidden=1536, layers=28, heads=12, groups=2, ffn=8960, vocab=151936
    ),  # Qwen2.5-1.5B
    "3B": qwen2(hidden=2048, layers=36, heads=16, groups=2, ffn=11008, vocab=151936),  # Qwen2.5-3B
}


EXPERTS: dict[str, dict[str, Any]] = {
    "36M": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "171M": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
}
"""Of Qwen3-MoE models, by their parameters: 11M and 48M are used for a token."""
SHAPES |= {
    "36M": qwen2(hidden=384, layers=6, heads=6, groups=2, ffn=1024, vocab=18432),
    "171M": qwen2(hidden=768, layers=4, heads=12, groups=4, ffn=2048, vocab=22528),
}


def write_random_model(
    path: Path,
    shape: Architecture,
    dtype: str = "float32",
    device: str = "cpu",
    family: str = "qwen2",
    **config: Any,
) -> int:
    """A HuggingFace directory with random weights (seed 0), drawn on `device`; returns its number of parameters.
    config: of the family's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    }
    with torch.device(device):
        made = AutoConfig.for_model(family, **{**sizes, **config})
        model = AutoModelForCausalLM.from_config(made).to(getattr(torch, dtype))
    model.save_pretrained(path)
    parameters = model.num_parameters()
    if device != "cpu":
        del model
        torch.cuda.empty_cache()  # the sides are other processes on the same GPU
    return parameters


# ---------------------------------------------------------------- sides that take turns


class Turns:
    """A side's end of the comparison. It calls `imported` once, then `begin` and `end` around each step, until `begin`
    says that no more are asked for."""

    def __init__(self, pipe: Connection, device: str) -> None:
        self._pipe, self._device = pipe, device
        self._baseline = 0.0
        self._ready = False
        self._started = (0.0, 0.0)

    def imported(self) -> None:
        """Memory counts from here on: everything is imported, no weights are loaded."""
        if self._device == "cpu":
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # a peak of the imports is not one of the steps
            self._baseline = _resident_mib("VmRSS")

    def begin(self) -> bool:
        """Waits for this side's turn; False where the comparison has ended, or its process is gone."""
        if not self._ready:
            self._pipe.send("ready")
            self._ready = True
        try:
            wanted = bool(self._pipe.recv())
        except EOFError:
            return False
        self._synchronize()
        self._started = (time.perf_counter(), time.process_time())
        return wanted

    def since_begin(self) -> float:
        """Seconds since the turn began."""
        self._synchronize()
        return time.perf_counter() - self._started[0]

    def end(self, **figures: float) -> None:
        """Answers with the turn's figures, and wall_s, cpu_s and peak_mib."""
        self._synchronize()
        wall, processor = self._started
        cost = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}
        self._pipe.send({**cost, "peak_mib": self._peak_mib(), **figures})

    def _peak_mib(self) -> float:
        if self._device == "cpu":
            return _resident_mib("VmHWM") - self._baseline
        import torch

        return torch.cuda.max_memory_reserved() / MIB

    def _synchronize(self) -> None:
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize()


Side = Callable[..., None]
"""(turns, *arguments) -> None, a function of a module: plays one side until it is told to end."""


def interleave(
    sides: Mapping[str, tuple[Any, ...]],
    rounds: int,
    *,
    threads: int,
    device: str = "cpu",
    warm_up: bool = True,
) -> dict[str, list[Figures]]:
    """{side: its figures, one for each of `rounds` steps, with warm_up after one more}. sides: {name: (Side, *arguments)}.

    The sides take steps in turn, the order changing each round, each in a process of its own."""
    taken: dict[str, list[Figures]] = {name: [] for name in sides}
    with ExitStack() as stack:
        pipes = {
            name: stack.enter_context(_child(threads, device, *side))
            for name, side in sides.items()
        }
        for name, pipe in pipes.items():
            _answer(name, pipe)  # everything is imported
        for number in range(rounds + warm_up):
            for name in list(pipes) if number % 2 else reversed(pipes):
                pipes[name].send(True)
                taken[name].append(_answer(name, pipes[name]))
                print(
                    f"  round {number}: {name} {taken[name][-1]['wall_s']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return taken


@contextmanager
def _child(threads: int, device: str, side: Side, *arguments: Any) -> Iterator[Connection]:
    """The pipe to a process that plays a side; the process ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_serve, args=(there, threads, device, side, arguments), daemon=True
    )
    process.start()
    there.close()
    try:
        yield here
        here.send(False)
        process.join(10)
    finally:
        process.kill()


def _answer(name: str, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"the side '{name}' ended before its turn; its error stands above")


def _serve(
    pipe: Connection, threads: int, device: str, side: Side, arguments: tuple[Any, ...]
) -> None:
    """A child process's whole life."""
    import logging

    import torch
    from transformers.utils import logging as transformers_logging

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # of one library to another
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    side(Turns(pipe, device), *arguments)


def _resident_mib(key: str) -> float:
    """MiB of /proc/self/status: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


# ---------------------------------------------------------------- figures


def summary(values: list[float]) -> Figures:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def spread(values: Figures) -> str:
    return f"{values['low']:.0f}..{values['high']:.0f}"


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}
