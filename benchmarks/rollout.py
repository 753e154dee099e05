#!/usr/bin/env python
"""Generated tokens per second in multi-turn search episodes: the embedded engine against transformers `generate`.

Every episode is a prompt, then turns of a response and an observation; lengths are drawn once and are the same for all
sides, which sample freely up to them. transformers generates a turn for all episodes that are left at a time: the
histories padded on the left and computed anew, the batch done when its longest response is. A prompt is shared by the
attempts of its group, as in GRPO, and all prompts begin with the same instruction.

    python benchmarks/rollout.py [--quick] [--model 18M|93M] [--dtype bfloat16] [--vllm-python PATH]

The sides take turns within one run. The last line is one JSON object. `tokens/s` counts generated tokens only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # threads that wait busily for each other cost most on shared cores

import torch

VOCAB = 8192
MODELS = {
    "1M": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "18M": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
    },
    "93M": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 13,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True)
class Workload:
    """prompts: ids per episode. responses and observations: their lengths per episode and turn, in tokens."""

    prompts: list[list[int]]
    responses: list[list[int]]
    observations: list[list[list[int]]]

    @property
    def generated(self) -> int:
        return sum(map(sum, self.responses))

    @property
    def longest(self) -> int:
        """Tokens of the longest episode."""
        return max(
            len(prompt) + sum(responses) + sum(map(len, observations))
            for prompt, responses, observations in zip(
                self.prompts, self.responses, self.observations
            )
        )


def make_workload(episodes: int, group: int, turns: int, scale: float, seed: int = 0) -> Workload:
    """Skewed lengths: a response has 16-256 tokens with a median of 40, an observation 60-200, an episode 1-`turns`
    turns. scale: of all lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(
            3, VOCAB, (max(1, round(count * scale)),), generator=generator
        ).tolist()

    def uniform(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def response() -> int:
        length = 40 * float(torch.exp(0.8 * torch.randn((), generator=generator)))
        return max(1, round(min(256.0, max(16.0, length)) * scale))

    instruction = ids(64)
    prompts: list[list[int]] = []
    while len(prompts) < episodes:
        prompts += [instruction + ids(uniform(12, 40))] * min(group, episodes - len(prompts))
    counts = [uniform(1, turns) for _ in range(episodes)]
    responses = [[response() for _ in range(count)] for count in counts]
    observations = [[ids(uniform(60, 200)) for _ in range(count - 1)] for count in counts]
    return Workload(prompts, responses, observations)


def make_model(path: Path, name: str) -> int:
    """Writes a random Qwen2 model with two key-value groups into `path`; returns the number of its parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **MODELS[name],
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return model.num_parameters()


# --- the sides: each returns a function that plays all episodes and gives how many tokens it computed in prompts ------


def play_episodes(engine: Any, workload: Workload) -> None:
    """Plays all episodes on an engine, an asyncio task per episode."""
    from rlflow.rollout.engine import Sampling

    async def episode(index: int) -> None:
        tokens = list(workload.prompts[index])
        for turn, length in enumerate(workload.responses[index]):
            completion = await engine.generate(tokens, Sampling(length), f"{index}")
            tokens += completion.tokens
            if turn < len(workload.observations[index]):
                tokens += workload.observations[index][turn]
        engine.release(f"{index}")

    async def play() -> None:
        await asyncio.gather(*(episode(index) for index in range(len(workload.prompts))))

    asyncio.run(play())


def rlflow_side(
    path: Path, workload: Workload, dtype: str, device: str = "cpu"
) -> Callable[[], int]:
    """The embedded engine."""
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine

    engine = EmbeddedEngine(
        path,
        max_concurrency=len(workload.prompts),
        dtype=dtype,
        max_tokens=workload.longest + 8,
        device=device,
    )

    def run() -> int:
        before, decoded = engine.statistics.prefilled, engine.statistics.decoded
        play_episodes(engine, workload)
        assert engine.statistics.decoded - decoded == workload.generated
        return engine.statistics.prefilled - before

    return run


def transformers_side(
    path: Path, workload: Workload, dtype: str, device: str = "cpu"
) -> Callable[[], int]:
    """`generate`, a turn of all episodes that are left at a time, padded on the left. No log-probs are kept."""
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    )

    class Lengths(StoppingCriteria):
        def __init__(self, width: int, lengths: list[int]) -> None:
            self.ends = width + torch.tensor(lengths, device=device)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= self.ends

    def run() -> int:
        histories = [list(prompt) for prompt in workload.prompts]
        computed = 0
        for turn in range(max(map(len, workload.responses))):
            left = [
                index for index, lengths in enumerate(workload.responses) if turn < len(lengths)
            ]
            lengths = [workload.responses[index][turn] for index in left]
            width = max(len(histories[index]) for index in left)
            computed += width * len(left)
            ids = torch.tensor([[0] * (width - len(histories[i])) + histories[i] for i in left])
            mask = torch.tensor(
                [[0] * (width - len(histories[i])) + [1] * len(histories[i]) for i in left]
            )
            output = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(lengths),
                stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
                pad_token_id=0,
            )
            for row, (index, length) in enumerate(zip(left, lengths)):
                histories[index] += output[row, width : width + length].tolist()
                if turn < len(workload.observations[index]):
                    histories[index] += workload.observations[index][turn]
        return computed

    return run


class VllmSide:
    """rlflow's vLLM engine, over the vLLM of another python. New weights come before each play, as in training."""

    def __init__(self, python: str, path: Path, workload: Workload, dtype: str) -> None:
        from rlflow.rollout.vllm.engines import make_vllm_engines

        self._path, self._workload = path, workload
        options = {"max_concurrency": len(workload.prompts), "max_tokens": workload.longest + 8}
        (self._engine,) = make_vllm_engines(path, python=python, dtype=dtype, kv_gib=2, **options)
        self.version = self._engine.server_facts.version

    def run(self) -> dict[str, float]:
        """{wall_s, cpu_s, prefilled} of one play; the CPU time is that of vLLM's processes too."""
        from rlflow.models.huggingface import iterate_weights

        asyncio.run(
            self._engine.load_weights(iterate_weights(self._path), self._engine.version + 1)
        )
        pid, counts = self._engine.server.served.child.pid, dataclasses.replace(self._engine.counts)
        before, start = cpu_s(pid), time.perf_counter()
        play_episodes(self._engine, self._workload)
        assert self._engine.counts.decoded - counts.decoded == self._workload.generated
        wall_s, prefilled = (
            time.perf_counter() - start,
            self._engine.counts.prefilled - counts.prefilled,
        )
        return {"wall_s": wall_s, "cpu_s": cpu_s(pid) - before, "prefilled": prefilled}

    def close(self) -> None:
        asyncio.run(self._engine.close())


def cpu_s(pid: int) -> float:
    """CPU seconds of this process, of another one and of its children."""
    import psutil

    other = psutil.Process(pid)
    times = [one.cpu_times() for one in (other, *other.children(recursive=True))]
    return time.process_time() + sum(one.user + one.system for one in times)


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(play: Callable[[], int]) -> dict[str, float]:
    wall, processor = time.perf_counter(), time.process_time()
    prefilled = play()
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - processor,
        "prefilled": prefilled,
    }


def interleave(
    sides: dict[str, Callable[[], dict[str, float]]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """One warm-up of each side, then `rounds` of them in turn."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            result = side()
            print(f"  round {number}: {name} {result['wall_s']:.1f} s", file=sys.stderr, flush=True)
            if number:
                runs[name].append(result)
    return runs


def summary(runs: dict[str, list[dict[str, float]]], generated: int) -> dict[str, dict[str, float]]:
    table = {}
    for name, results in runs.items():
        rates = sorted(generated / result["wall_s"] for result in results)
        table[name] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_min": rates[0],
            "tokens_per_s_max": rates[-1],
            "tokens_per_cpu_s": statistics.median(
                generated / result["cpu_s"] for result in results
            ),
            "prompt_tokens_computed": results[0]["prefilled"],
        }
    return table


def print_table(table: dict[str, dict[str, float]], baseline: str) -> None:
    print(
        f"{'':14}{'tokens/s':>10}{'min':>8}{'max':>8}{'ratio':>8}{'tokens/cpu-s':>14}{'ratio':>8}{'prompt tokens':>15}"
    )
    base = table[baseline]
    for name, row in table.items():
        print(
            f"{name:14}{row['tokens_per_s']:10.0f}{row['tokens_per_s_min']:8.0f}{row['tokens_per_s_max']:8.0f}"
            f"{row['tokens_per_s'] / base['tokens_per_s']:8.2f}{row['tokens_per_cpu_s']:14.0f}"
            f"{row['tokens_per_cpu_s'] / base['tokens_per_cpu_s']:8.2f}{row['prompt_tokens_computed']:15.0f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: lengths a sixth, one round"
    )
    parser.add_argument("--model", choices=MODELS, default="18M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--episodes", type=int, default=64, help="all of them at once")
    parser.add_argument("--group", type=int, default=8, help="episodes that share a prompt")
    parser.add_argument("--turns", type=int, default=4, help="most turns of an episode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--vllm-python", help="python of an environment with vLLM, to measure beside the others"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    import transformers

    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for vLLM's processes
    rounds, scale = (1, 1 / 6) if options.quick else (options.rounds, 1.0)
    workload = make_workload(options.episodes, options.group, options.turns, scale)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        parameters = make_model(path, options.model)
        play = rlflow_side(path, workload, options.dtype)
        play_transformers = transformers_side(path, workload, options.dtype)
        sides = {
            "transformers": lambda: measured(play_transformers),
            "rlflow": lambda: measured(play),
        }
        vllm = None
        if options.vllm_python:
            vllm = VllmSide(options.vllm_python, path, workload, options.dtype)
            sides["vllm"], versions["vllm"] = vllm.run, vllm.version
        try:
            table = summary(interleave(sides, rounds), workload.generated)
        finally:
            if vllm is not None:
                vllm.close()
    print(
        f"\n{options.episodes} episodes in groups of {options.group}, {workload.generated} tokens generated, the longest episode "
        f"{workload.longest}; Qwen2 of {parameters / 1e6:.1f}M parameters in {options.dtype}, {options.threads} thread(s), "
        f"{rounds} round(s); "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    print_table(table, "transformers")
    if not options.vllm_python:
        print("vLLM: not installed in this environment; name another one with --vllm-python PATH")
    ratio = table["rlflow"]["tokens_per_s"] / table["transformers"]["tokens_per_s"]
    print(
        json.dumps(
            {
                "benchmark": "rollout",
                "ratio": ratio,
                "parameters": parameters,
                "generated": workload.generated,
                "rounds": rounds,
                "options": vars(options),
                "versions": versions,
                "sides": table,
            }
        )
    )


if __name__ == "__main__":
    main()
