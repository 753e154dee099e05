#!/usr/bin/env python
"""What an agent of the user's own costs: the demo, 64 episodes at once, played natively and through the endpoint.

    python benchmarks/endpoint.py [--quick] [--rounds 5]

native    the search environment
openai    recipes/searchr1/agent.py, an async function of this process on the vendor's client
raw       the same loop on a bare aiohttp client: what is left is the endpoint's own share

Policy, questions, seeds and engine (embedded, one thread) are the same. The sides take turns within one run, each in a process
of its own. tokens/s counts generated tokens; `ratio` is the median of the rounds' ratios to native. `between` is what passes
between the end of a response and the request that follows it, in the same episode: the reply, the agent with its search, and the
next request; `overhead` is its p50 and p99 less the native environment's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Figures, Turns, interleave, summary, versions

EPISODES, SAMPLES = 64, 4
RECIPE = Path(__file__).resolve().parents[1] / "recipes/searchr1"
POLICY = RECIPE / "starting_policy"
LIMITS = {"max_turns": 4, "max_response_tokens": 40, "max_total_tokens": 1024, "temperature": 1.0}
SIDES = {"native": None, "openai": RECIPE / "agent.py", "raw": Path(__file__).resolve()}


def main() -> None:
    """Plays the sides in turns, prints the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, under a minute")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    rounds = min(args.rounds, 2) if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: (side, folder, agent) for name, agent in SIDES.items()}
        taken = interleave(sides, rounds, threads=args.threads)
    report({name: found[1:] for name, found in taken.items()}, args)


def side(turns: Turns, folder: str, agent: Path | None) -> None:
    """Collects the same episodes in every turn."""
    from rlflow.rollout import Rollout
    from rlflow_environments.search.sources import world_files

    files = world_files({"directory": folder})
    os.environ["CORPUS"] = str(files["corpus"])
    environment = native(files) if agent is None else through_endpoint(files, agent)
    engine = {"max_concurrency": EPISODES}
    with Rollout.from_pretrained(
        POLICY, environment, engine=engine, samples_per_prompt=SAMPLES, **LIMITS
    ) as rollout:
        tasks = environment.tasks("train")[: EPISODES // SAMPLES]
        generated = watched(rollout.engines[0])
        turns.imported()
        step = 0
        while turns.begin():
            step += 1  # other samples in every round, the same on all sides
            generated.clear()
            groups = rollout.collect(tasks, step)
            played = [one for group in groups for one in group.trajectories]
            tokens = sum(int(part.loss_mask.sum()) for one in played for part in one.segments)
            waits = sorted(wait for one in played for wait in between(one, generated))
            turns.end(
                tokens_per_s=tokens / turns.since_begin(),
                tokens=tokens,
                requests=sum(len(one.turns) for one in played),
                reward=statistics.fmean(one.reward for one in played),
                between_p50_ms=1e3 * waits[len(waits) // 2],
                between_p99_ms=1e3 * waits[len(waits) * 99 // 100],
            )


def native(files: dict[str, Path]) -> Any:
    """The demo's environment."""
    from rlflow_environments.search import SearchEnvironment

    return SearchEnvironment(files["corpus"], files["train"])


def through_endpoint(files: dict[str, Path], agent: Path) -> Any:
    """The same questions for an agent."""
    from rlflow_environments.program.program import ProgramEnvironment

    reward = f"{SIDES['openai']}:reward"
    return ProgramEnvironment(f"{agent}:agent", files["train"], reward=reward, messages="text")


def watched(engine: Any) -> dict[str, list[float]]:
    """{request id: seconds of each of its responses}, filled as the engine answers."""
    seconds: dict[str, list[float]] = defaultdict(list)
    generate = engine.generate

    async def timed(tokens: Any, sampling: Any, request_id: str, priority: int = 0) -> Any:
        started = time.monotonic()
        try:
            return await generate(tokens, sampling, request_id, priority)
        finally:
            seconds[request_id.split("/", 2)[2]].append(time.monotonic() - started)

    engine.generate = timed
    return seconds


def between(one: Any, generated: dict[str, list[float]]) -> list[float]:
    """Seconds from each response but the last to the request that follows it."""
    seconds = generated[f"{one.group_id}/{one.attempt}"]
    return [turn.duration_s - took for turn, took in zip(one.turns[:-1], seconds, strict=False)]


async def agent(task: dict[str, Any], client: Any) -> None:
    """The agent of the side `raw`: that of the recipe, on a client that reads and writes JSON and no more."""
    import aiohttp

    from recipes.searchr1.agent import agent

    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {client.api_key}"}
    ) as session:

        async def create(extra_body: dict[str, Any], **body: Any) -> Any:
            async with session.post(
                f"{client.base_url}chat/completions", json={**body, **extra_body}
            ) as answer:
                choice = (await answer.json())["choices"][0]
            return Named(choices=[Named(message=Named(**choice["message"]))])

        await agent(task, Named(chat=Named(completions=Named(create=create))))


def report(taken: dict[str, list[Figures]], args: argparse.Namespace) -> None:
    """Prints the table and the figures as JSON."""
    figures: dict[str, Any] = {}
    native = taken["native"]
    print(f"{EPISODES} episodes at once, {args.threads} thread(s)\n")
    heads = f"{'between p50':>14}{'p99 ms':>10}{'overhead p50':>15}{'p99 ms':>10}{'cpu s':>8}"
    print(f"{'side':10}{'tokens/s':>10}{'ratio':>8}{heads}")
    for name, found in taken.items():
        own = {key: summary([one[key] for one in found]) for key in found[0]}
        pairs = list(zip(found, native, strict=True))
        own["ratio"] = summary([one["tokens_per_s"] / base["tokens_per_s"] for one, base in pairs])
        for key in ("p50", "p99"):
            own[f"overhead_{key}_ms"] = summary(
                [one[f"between_{key}_ms"] - base[f"between_{key}_ms"] for one, base in pairs]
            )
        at = {key: value["median"] for key, value in own.items()}
        print(
            f"{name:10}{at['tokens_per_s']:>10.0f}{at['ratio']:>8.2f}{at['between_p50_ms']:>14.1f}{at['between_p99_ms']:>10.1f}"
            f"{at['overhead_p50_ms']:>15.1f}{at['overhead_p99_ms']:>10.1f}{at['cpu_s']:>8.2f}"
        )
        figures[name] = own
    told = {
        **versions("openai", "uvicorn", "starlette", "aiohttp", "torch"),
        "python": platform.python_version(),
    }
    print(
        json.dumps(
            {"episodes": EPISODES, "threads": args.threads, "sides": figures, "versions": told}
        )
    )


if __name__ == "__main__":
    main()
