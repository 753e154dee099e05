"""vLLM's side of rollout.py: `python rollout_vllm.py WORKLOAD.json`, run by the python of an environment with vLLM.

Prints one JSON line when it is ready and one after each play; a play starts with a line on its standard input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def make_engine(job: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job["model"],
            dtype=job["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_num_seqs=len(job["prompts"]),
            max_model_len=4096,
            logprobs_mode="processed_logprobs",
        )
    )


def play(engine: Any, job: dict[str, Any]) -> int:
    """Plays all episodes; returns how many tokens of prompts were not found in the prefix cache."""
    from vllm import SamplingParams

    histories = [list(prompt) for prompt in job["prompts"]]
    turns = [0] * len(histories)
    computed = 0

    def ask(index: int) -> None:
        length = job["responses"][index][turns[index]]
        sampling = SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        engine.add_request(f"{index}/{turns[index]}", {"prompt_token_ids": histories[index]}, sampling)

    for index in range(len(histories)):
        ask(index)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            index = int(output.request_id.split("/")[0])
            computed += len(histories[index]) - (output.num_cached_tokens or 0)
            histories[index] += output.outputs[0].token_ids
            observations = job["observations"][index]
            if turns[index] < len(observations):
                histories[index] += observations[turns[index]]
                turns[index] += 1
                ask(index)
    return computed


def main() -> None:
    import vllm

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = make_engine(job)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for _ in sys.stdin:
        engine.reset_prefix_cache()  # as after new weights
        wall, processor = time.perf_counter(), time.process_time()
        prefilled = play(engine, job)
        result = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - processor,
            "prefilled": prefilled,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
