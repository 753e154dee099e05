"""Experiments of agent systems: each rule can say yes and no, the server speaks the protocol, and a cell of each runs."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

import experiments
from experiments import rlinf
from experiments.curves import at_the_end, smoothed
from experiments.tasks.chains import Chains
from experiments.tasks.keys import Keys
from experiments.tasks.old_ways import Together
from experiments.tasks.table import Carrying, ProgressCritic, right_way
from experiments.tasks.table_programs import RIGHT, Script

from recipes.rule_server import RuleServer
from rlflow.environment import Environment
from rlflow.types import Episode, Step, Task

GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "sapo_swarm": {
        "8/0": {"cumulative": 10.0, "weakest": 8.0, "curve": [1.0]},
        "6/2": {"cumulative": 12.0, "weakest": 9.0, "curve": [1.0]},
        "4/4": {"cumulative": 14.0, "weakest": 9.0, "curve": [1.0]},
        "2/6": {"cumulative": 13.0, "weakest": 9.0, "curve": [1.0]},
        "4/4, one node lies": {"cumulative": 14.0, "weakest": 9.0, "curve": [1.0]},
    },
    "dart": {
        "step-wise GRPO": {"success": 0.6},
        "+ success pool": {"success": 0.8},
        "+ entropy steps": {"success": 0.85},
        "+ correction": {"success": 0.9},
    },
    "mobile_agent": {
        "GRPO": {"success": 0.7},
        "trajectory-aware, without replay": {"success": 0.5},
        "trajectory-aware": {"success": 0.8},
    },
    "vlac": {
        "sparse": {"success": 0.5, "start": 0.3, "episodes_to_80": 3200.0},
        "progress and demonstrations": {"success": 0.9, "episodes_to_80": 900.0},
        "progress": {
            "success": 0.9,
            "episodes_to_80": 1000.0,
            "order_success": 0.95,
            "order_failure": 0.3,
            "order_reversed": 0.8,
        },
    },
    "mle_duration_programs": {
        "unweighted, no baseline": {"slow": 0.3},
        "by duration, no baseline": {"slow": 0.9},
        "unweighted, critic": {"slow": 0.9},
        "by duration, critic": {"slow": 0.9},
    },
    "mle_stages_programs": {
        "without": {"stages": 0.3, "first": 0.1},
        "instrumentation": {"stages": 2.5, "first": 1.0},
    },
    "dart_counts": {
        "step-wise GRPO": {"success": 0.6},
        "+ counts by task": {"success": 0.7},
        "+ lengths by task": {"success": 0.8},
        "+ pool, entropy, correction": {"success": 0.5},
        "step-wise GRPO, at 2e-3": {"success": 0.5},
        "+ lengths by task, at 2e-3": {"success": 0.5},
    },
    "distillation": {
        "the reward alone": {"success": 0.6},
        "reverse KL of samples": {"success": 0.9, "teacher": 0.95},
        "forward KL, top 8": {"success": 0.92, "teacher": 0.95},
    },
    "rlinf": {
        **{arm: {"step_s": 3.5, "success": 0.7} for arm in rlinf.ARMS},
        "as it is": {"step_s": 3.0, "success": 0.7},
        rlinf.TOGETHER: {"step_s": 5.0, "success": 0.75},
    },
    "asearcher": {
        "4 turns": {"near": 0.9, "far": 0.0},
        "12 turns": {"near": 0.9, "far": 0.7, "learned": 0.9},
    },
    "asearcher_guesses": {
        "4 turns": {"far": 0.2},
        "12 turns": {"far": 0.7, "learned": 0.9},
        "12 turns, at most 3 hops": {"far": 0.6},
    },
    "asyncflow": {
        "barrier": {"rate": 1.0},
        "+ streaming": {"rate": 2.0},
        "+ delayed update": {"rate": 2.7, "lag": 1.0},
    },
    "areal_interruption": {"waits": {"rate": 1.0}, "interrupts": {"rate": 1.15}},
    "llamarl_sizes": {
        "tiny": {"saved_s": 0.1, "times": 2.0},
        "18M": {"saved_s": 0.4, "times": 3.0},
        "93M": {"saved_s": 2.0, "times": 4.0},
    },
    "dart_utilisation": {
        "batch by batch": {"busy": 0.3},
        "task by task": {"busy": 0.4},
        "episode by episode": {"busy": 0.9},
    },
    "areal_answers": {
        "lag 0, naive": {"success": 0.9},
        "lag 0, decoupled": {"success": 0.9},
        "lag 4, naive": {"success": 0.6},
        "lag 4, decoupled": {"success": 0.9},
        "lag 4, naive, at 1e-3": {"success": 0.9},
        "lag 4, decoupled, at 1e-3": {"success": 0.9},
    },
    "llamarl_late": {
        **{f"lag {lag}, cap 2": {"success": 0.9} for lag in (1, 8, 16)},
        **{f"lag {lag}, no correction": {"success": 0.8} for lag in (1, 8, 16)},
    },
}
BAD = [
    ("sapo_swarm", "4/4", "cumulative", 9.0),
    ("sapo_swarm", "2/6", "cumulative", 15.0),
    ("sapo_swarm", "4/4, one node lies", "curve", [0.9]),
    ("dart", "+ success pool", "success", 0.5),
    ("dart", "+ correction", "success", 0.84),
    ("mobile_agent", "trajectory-aware", "success", 0.4),
    ("mobile_agent", "GRPO", "success", 0.9),
    ("vlac", "sparse", "start", 0.5),
    ("vlac", "progress", "success", 0.2),
    ("vlac", "progress", "order_failure", 0.96),
    ("vlac", "progress", "order_reversed", -0.1),
    ("vlac", "progress and demonstrations", "episodes_to_80", 1500.0),
    ("mle_duration_programs", "unweighted, no baseline", "slow", 0.6),
    ("mle_duration_programs", "by duration, no baseline", "slow", 0.7),
    ("mle_stages_programs", "instrumentation", "stages", 1.2),
    ("mle_stages_programs", "without", "stages", 0.8),
    ("dart_counts", "+ counts by task", "success", 0.85),
    ("dart_counts", "step-wise GRPO", "success", 0.71),
    ("distillation", "the reward alone", "success", 0.91),
    ("distillation", "reverse KL of samples", "success", 0.8),
    ("distillation", "forward KL, top 8", "teacher", 1.05),
    ("rlinf", rlinf.TOGETHER, "step_s", 4.5),
    ("rlinf", rlinf.TOGETHER, "success", 0.5),
    ("asearcher", "4 turns", "far", 0.1),
    ("asearcher", "12 turns", "far", 0.1),
    ("asearcher", "12 turns", "learned", 0.7),
    ("asearcher_guesses", "4 turns", "far", 0.3),
    ("asyncflow", "+ streaming", "rate", 0.9),
    ("asyncflow", "+ delayed update", "lag", 1.1),
    ("areal_interruption", "interrupts", "rate", 1.04),
    ("llamarl_sizes", "18M", "saved_s", 0.05),
    ("llamarl_sizes", "93M", "times", 1.5),
    ("dart_utilisation", "task by task", "busy", 0.95),
    ("dart_utilisation", "batch by batch", "busy", 0.7),
    ("llamarl_late", "lag 8, cap 2", "success", 0.8),
    ("llamarl_late", "lag 16, no correction", "success", 0.88),
    ("areal_answers", "lag 4, naive", "success", 0.88),
    ("areal_answers", "lag 4, decoupled", "success", 0.7),
]


def verdict(name: str, numbers: dict[str, dict[str, Any]]) -> tuple[bool, str]:
    [one] = experiments.load([name])
    assert set(numbers) == set(one.arms)
    return one.judge({arm: [copy.deepcopy(figures)] * 3 for arm, figures in numbers.items()})


@pytest.mark.parametrize("name", GOOD)
def test_numbers_as_the_paper_has_them_reproduce(name: str) -> None:
    reproduces, told = verdict(name, GOOD[name])
    assert reproduces and "NOT" not in told and "nan" not in told


@pytest.mark.parametrize(("name", "arm", "figure", "value"), BAD)
def test_numbers_against_the_claim_do_not(name: str, arm: str, figure: str, value: Any) -> None:
    numbers = copy.deepcopy(GOOD[name])
    numbers[arm][figure] = value
    assert not verdict(name, numbers)[0]


def test_one_seed_against_the_claim_is_enough() -> None:
    [one] = experiments.load(["mobile_agent"])
    results = {
        arm: [copy.deepcopy(figures) for _ in range(3)]
        for arm, figures in GOOD["mobile_agent"].items()
    }
    results["trajectory-aware"][1]["success"] = 0.4
    assert not one.judge(results)[0]


def test_the_end_of_a_curve_is_its_last_quarter() -> None:
    assert at_the_end([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5]) == 0.75 and at_the_end([0.3]) == 0.3
    assert smoothed([0.0, 1.0, 1.0], 2) == [0.0, 0.5, 1.0]


def steps(environment: Any, task: Task, responses: str | list[str]) -> list[Step]:
    episode, found = Episode(task), []
    for response in responses:
        episode.turns += 1
        found.append(environment.answer(episode, response))
    return found


def test_the_tasks_reward_what_they_say_and_nothing_else() -> None:
    keys = Keys([3], keys=4)
    [task] = keys.tasks("train")
    assert [step.reward for step in steps(keys, task, task.answer)] == [0, 0, 1]
    assert steps(keys, task, task.answer[:2] + "?")[-1].reward == -0.5
    wandering = Keys([3], keys=4, wander=5)
    [task] = wandering.tasks("train")
    assert [step.reward for step in steps(wandering, task, task.answer)] == [0, 0, 1]
    wrong = [one.terminated for one in steps(wandering, task, task.answer[:2] + "???")]
    assert wrong == [False, False, False, False, True]
    chains = Chains()
    two = chains.tasks("val")[1]
    way = two.answer
    seen = steps(chains, two, [f"s{way[0]}", f"s{way[1]}", f"={way[2]}"])
    assert [step.observation for step in seen] == [f">{way[1]}", f".{way[2]}", ""] and seen[
        -1
    ].reward == 1
    assert (
        steps(chains, two, [f"={way[1]}"])[0].reward == 0
        and steps(chains, two, [f"s{way[2]}"])[0].observation[0] == "-"
    )


def test_the_shortest_way_carries_the_cup_and_its_critic_sees_progress() -> None:
    table = Carrying()
    ways = [right_way(task.answer) for task in table.tasks("train")]
    assert all(way[-1][1] == way[-1][2] and not way[-1][3] for way in ways)
    critic = ProgressCritic(0, [way for way in ways if way[0][2] == 3], updates=60)
    prompt = 'works on this task: "a0c1g3h0" before: "{}" now: "{}"'
    forward, backward = (json.loads(critic.reply(prompt.format(*pair)).split(". ")[1])["progress"]
                         for pair in (("a0c1g3h0", "a1c1g3h0"), ("a1c1g3h0", "a0c1g3h0")))  # fmt: skip
    assert forward > 0 > backward


def test_a_server_of_rules_answers_until_it_is_closed() -> None:
    def asked(url: str) -> str:
        body = json.dumps({"messages": [{"role": "user", "content": "abc"}]}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/chat/completions", body), timeout=5
        ) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]

    with RuleServer(str.upper) as server:
        assert asked(server.url) == "ABC" and server.requests == 1
        server.close()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            asked(server.url)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_a_quick_cell_of_every_arm_runs(name: str) -> None:
    [one] = experiments.load([name])
    for arm in one.quick_arms or one.arms:
        figures = one.run(arm, random.Random(name).randrange(3), True)
        assert all(isinstance(value, (float, int, list)) for value in figures.values())


def test_turns_in_step_wait_for_all_that_are_open() -> None:
    """Three episodes of one, two and three turns: nobody begins a turn that another one of them has yet to end."""

    async def played() -> list[tuple[int, int]]:
        together, ended = Together(), list[tuple[int, int]]()

        async def episode(turns: int) -> None:
            for turn in range(turns):
                await asyncio.sleep(0.001 * turns)
                await together.turn()
                ended.append((turn, turns))
            together.leave()

        for _ in range(3):
            together.enter()
        await asyncio.gather(*map(episode, (1, 2, 3)))
        return ended

    order = [turn for turn, _ in asyncio.run(asyncio.wait_for(played(), 10))]
    assert order == [0, 0, 0, 1, 1, 2]


needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)


@pytest.mark.parametrize(
    "make", [lambda: Keys([2]), Chains, Carrying, pytest.param(Script, marks=needs_bubblewrap)]
)
def test_the_tasks_are_environments(make: Callable[[], Environment]) -> None:
    environment = make()
    ids = [task.id for task in environment.tasks("train")]
    assert isinstance(environment, Environment) and len(set(ids)) == len(ids)


@needs_bubblewrap
def test_a_program_of_the_right_parts_predicts_and_every_other_order_tells_how_far_it_came() -> (
    None
):
    async def played(letters: str) -> tuple[float, float]:
        script = Script()
        step = await script.step(Episode(script.tasks("train")[0]), letters)
        return step.metrics["stages"], step.reward

    stages, score = asyncio.run(played(RIGHT))
    assert stages == 3 and score > 0.9
    assert asyncio.run(played("ilxfp")) == (1, 0) and asyncio.run(played("lilfp")) == (0, 0)
