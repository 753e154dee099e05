"""The memory estimate of `rlflow train --dry-run` against measured peaks, on a CPU.

Each case is a configuration whose step fills its budget: the trainer's update (in one process, or in ranks over gloo), or the
embedded engine with all its slots at the limit, in processes of their own. Compared is what a process holds at its
highest above what it held after its imports, with the estimate less its `libraries`. vLLM (`--vllm-python PATH`) is
compared as a whole, all its processes together, what they share counted once (PSS). Aim: within 15%. The last line is one
JSON object."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import MIB, SHAPES, versions, write_random_model
from train_step import make_batch, policy_gradient

AIM = 0.15
ROWS, LENGTH = 4, 512


@dataclass(frozen=True)
class Case:
    """part: update, rollout, or vllm. overrides: of the configuration, beside the shapes of the batch."""

    name: str
    model: str
    part: str = "update"
    overrides: tuple[str, ...] = ()
    ranks: int = 0
    rows: int = ROWS
    length: int = LENGTH


CASES = (
    Case("18M", "18M"),
    Case("93M", "93M", rows=2),
    Case("18M packed", "18M", overrides=("trainer.packing=true",)),
    Case("18M long rows", "18M", rows=2, length=2048),
    Case("18M small chunks of logits", "18M", overrides=("trainer.logits_chunk_mib=16",)),
    Case(
        "93M reference",
        "93M",
        rows=2,
        overrides=("algorithm.losses=[ppo_clip, {name: kl, coefficient: 0.1}]",),
    ),
    Case("93M selective", "93M", rows=2, overrides=("trainer.recompute=selective",)),
    Case("93M full recompute", "93M", rows=2, overrides=("trainer.recompute=full",)),
    Case("93M bfloat16", "93M", rows=2, overrides=("model.dtype=bfloat16",)),
    Case(
        "18M critic",
        "18M",
        overrides=("algorithm={advantage: gae, losses: [ppo_clip, value], critic: {lr: 1.0e-5}}",),
    ),
    Case("93M TP2", "93M", rows=2, overrides=("trainer.tensor_parallel=2",), ranks=2),
    Case(
        "93M PP2",
        "93M",
        rows=2,
        overrides=("trainer.pipeline_parallel=2", "trainer.tokens_per_microbatch=512"),
        ranks=2,
    ),
    Case(
        "93M DP2 distributed optimizer",
        "93M",
        rows=2,
        overrides=("trainer.distributed_optimizer=true",),
        ranks=2,
    ),
    Case("18M engine", "18M", "rollout", rows=32, length=512),
    Case("93M engine", "93M", "rollout", rows=16, length=512),
    Case("18M vLLM", "18M", "vllm", rows=32, length=512),
    Case("93M vLLM", "93M", "vllm", rows=16, length=512),
    Case(
        "93M vLLM, 2 GiB of keys and values",
        "93M",
        "vllm",
        ("rollout.engine.kv_gib=2",),
        rows=16,
        length=512,
    ),
    Case("93M vLLM bfloat16", "93M", "vllm", ("model.dtype=bfloat16",), rows=16, length=512),
)


def configuration(case: Case, path: Path) -> Any:
    from rlflow.config.schema import load_config

    engine = "vllm" if case.part == "vllm" else "embedded"
    shape = (f"rollout.prompts_per_step={case.rows}", "rollout.samples_per_prompt=1", f"rollout.max_total_tokens={case.length}",
             f"rollout.max_response_tokens={case.length - 1}", f"data.max_prompt_tokens={case.length // 2}",
             f"rollout.engine={{name: {engine}, max_concurrency: {case.rows}}}", f"cluster.ranks={case.ranks}",
             f"trainer.tokens_per_microbatch={case.rows * case.length}", "algorithm.advantage=reinforce")  # fmt: skip
    return load_config(
        None, [f"model.path={path}", "environment.name=none", *shape, *case.overrides]
    )


def estimated_mib(case: Case, path: Path) -> list[float]:
    """Of each process that is measured."""
    from rlflow.models.architecture import architecture
    from rlflow.models.huggingface import read_config
    from rlflow.preflight.estimates import rank_parts, run_sizes, server_memory, update_parts

    sizes = run_sizes(configuration(case, path), architecture(read_config(path)))
    if case.part == "rollout":
        return [sum(sizes.engine.memory(sizes.engine_load).values()) / MIB]
    if case.part == "vllm":
        return [server_memory(sizes)[0].total / MIB]
    stages = sizes.trainer.pipeline_parallel
    parts = [{**rank_parts(sizes, stage), **update_parts(sizes, stage)} for stage in range(stages)]
    return [sum(part.values()) / MIB for part in parts for _ in range(max(case.ranks, 1) // stages)]


def measured_mib(case: Case, path: Path) -> list[float]:
    """The peak of each process above what it held after its imports."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        pipes, processes = [], []
        for rank in range(max(case.ranks, 1)):
            here, there = context.Pipe()
            processes.append(
                context.Process(target=_child, args=(there, case, path, rank, meeting), daemon=True)
            )
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            sys.exit(f"{case.name}: a process ended before it answered; its error stands above")
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def measured_vllm_mib(case: Case, path: Path, python: str) -> list[float]:
    """The peak of vLLM's processes together while it starts, samples all rows and gets new weights."""
    import psutil

    from rlflow.rollout.vllm.engines import make_vllm_engines

    config = configuration(case, path)
    options = {name: value for name, value in config.rollout.engine.items() if name != "name"}
    done, peaks = threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.3):
            peaks[0] = max(
                peaks[0], sum(proportional_mib(one.pid) for one in psutil.Process().children())
            )

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        (engine,) = make_vllm_engines(
            path, python=python, dtype=config.model.dtype, max_tokens=case.length, **options
        )
        asyncio.run(_sample_and_load(case, engine, path))
        engine.kill()
    finally:
        done.set()
        watching.join()
    return peaks


def proportional_mib(pid: int) -> float:
    """Of a process and those it started: memory of their own, and their shares of what several have (PSS)."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / MIB


async def _sample_and_load(case: Case, engine: Any, path: Path) -> None:
    from rlflow.models.huggingface import iterate_weights

    await _fill(case, engine)
    await engine.load_weights(iterate_weights(path), 1)
    await engine.close()


def _child(pipe: Connection, case: Case, path: Path, rank: int, meeting: str) -> None:
    import logging

    import torch
    import torch.distributed as dist
    from common import _resident_mib

    import rlflow.rollout.embedded.embedded_engine
    import rlflow.trainer.megatron  # noqa: F401
    from rlflow.rollout import Tokenizer  # noqa: F401

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if case.ranks:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=case.ranks
        )
    config = configuration(case, path)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_mib("VmRSS")
    if case.part == "rollout":
        asyncio.run(_sample(case, config))
    else:
        _update(case, config)
    pipe.send(_resident_mib("VmHWM") - before)


def _update(case: Case, config: Any) -> None:
    import dataclasses

    from rlflow.algorithms.algorithm import algorithm_needs
    from rlflow.trainer.base import Trainer

    options: dict[str, Any] = {**dataclasses.asdict(config.trainer), "dtype": config.model.dtype}
    needs = algorithm_needs(config.algorithm)
    if config.algorithm.critic is not None:
        options["critic"] = dataclasses.asdict(config.algorithm.critic)
    trainer = Trainer.from_pretrained(config.model.path, **options)
    batch = make_batch((case.length,) * case.rows, SHAPES[case.model].vocab)
    if "reference" in needs:
        trainer.snapshot("reference")
    loss: Any = policy_gradient
    if config.algorithm.critic is not None:
        from rlflow.algorithms.algorithm import make_loss

        loss = make_loss(config.algorithm.losses)
        batch = batch.replace(
            values=batch.advantages, returns=batch.advantages, proximal_logprobs=batch.logprobs
        )
    for _ in range(2):
        if "reference" in needs:
            trainer.score(batch, model="reference")
        trainer.update(batch, loss)
    trainer.close()


async def _sample(case: Case, config: Any) -> None:
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine

    options = {name: value for name, value in config.rollout.engine.items() if name != "name"}
    engine = EmbeddedEngine(
        config.model.path, dtype=config.model.dtype, max_tokens=case.length, **options
    )
    await _fill(case, engine)
    await engine.close()


async def _fill(case: Case, engine: Any) -> None:
    """Samples until every row is as long as it may be."""
    from rlflow.rollout.engine import Sampling

    half = case.length // 2
    prompts = [[(7 * row + place) % 1000 for place in range(half)] for row in range(case.rows)]
    calls = [
        engine.generate(prompt, Sampling(case.length - half), f"{row}")
        for row, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*calls)


def compare(case: Case, folder: Path, vllm_python: str) -> dict[str, Any]:
    path = folder / case.model
    if not path.is_dir():
        write_random_model(path, SHAPES[case.model], eos_token_id=None)
    expected = estimated_mib(case, path)
    found = (
        measured_vllm_mib(case, path, vllm_python)
        if case.part == "vllm"
        else measured_mib(case, path)
    )
    worst = max(zip(expected, found, strict=True), key=lambda pair: abs(pair[0] / pair[1] - 1))
    return {"case": case.name, "estimated_mib": expected, "measured_mib": found, "ratio": worst[0] / worst[1],
            "passed": abs(worst[0] / worst[1] - 1) <= AIM}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the two plain cases and an engine: half a minute"
    )
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("RLFLOW_VLLM_PYTHON", ""), metavar="PATH",
        help="interpreter of an environment with vLLM, for its cases (default: $RLFLOW_VLLM_PYTHON; none: left out)",
    )  # fmt: skip
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    python = "" if options.vllm_python == "none" else options.vllm_python
    chosen = [
        case for case in CASES if options.only in case.name and (python or case.part != "vllm")
    ]
    if options.quick:
        chosen = [case for case in chosen if case.name in ("18M", "93M", "18M engine")]
    results = []
    print(f"{'case':<36}{'estimated, MiB':>16}{'measured, MiB':>16}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            results.append(compare(case, Path(folder), python))
            for expected, found in zip(
                results[-1]["estimated_mib"], results[-1]["measured_mib"], strict=True
            ):
                print(
                    f"{case.name:<36}{expected:>16.0f}{found:>16.0f}{expected / found:>8.2f}",
                    flush=True,
                )
    packages = {"python": platform.python_version(), **versions("rlflow", "torch", "megatron-core")}
    print(
        json.dumps(
            {"benchmark": "memory_estimate", "versions": packages, "aim": AIM, "results": results}
        )
    )


if __name__ == "__main__":
    main()
