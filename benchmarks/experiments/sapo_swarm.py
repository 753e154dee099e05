"""The swarm of SAPO: four nodes that are weak on different families share what they sample."""

from __future__ import annotations

import json
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.curves import curves

NODES = 4
ROUNDS = 20
KNOWN = 0.6  # chance of the right letter in a family that a node was warmed up on
ARMS = ("8/0", "6/2", "4/4", "2/6", "4/4, one node lies")


def run(
    arm: str, seed: int, quick: bool, count: int = NODES, rounds_in_all: int = ROUNDS
) -> Figures:
    """cumulative: the mean reward of a node's own samples, added up over rounds, the mean over nodes; weakest: of the node that
    has least; weak: the mean reward in the family that a node is weak in; external: groups of others per node and round."""
    import tempfile

    from experiments.small_run import small_run
    from experiments.tasks.ciphers import LYING, REFERENCE, Ciphers

    task = Ciphers(seed)
    own, external = (int(number) for number in arm[:3].split("/"))
    with ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm_"))
        nodes = []
        for number in range(count):
            name = LYING if "lies" in arm and number == 0 else "directory"
            swarm = {"name": "swarm", "peer": f"node{number}", "local": own, "external": external, "fill": "local",
                     "transport": {"name": name, "path": shared}}  # fmt: skip
            filters = f"algorithm.filters={json.dumps([swarm] if external else [])}"
            node = stack.enter_context(
                small_run(
                    10 * seed + number,
                    {"name": REFERENCE, "seed": seed},
                    task.characters,
                    filters,
                    "run.deterministic=true",
                    preset="sapo_swarm",
                )
            )
            node.warm_up(beginning(node.tokenizer, task, number, seed), 4 if quick else 20)
            nodes.append(node)
        rounds, weak = [], list[float]()
        for _ in range(2 if quick else rounds_in_all):
            rounds.append([node.step() for node in nodes])
            weak.append(fmean(in_weak_family(node, number) for number, node in enumerate(nodes)))
    totals = [sum(row[node]["train/exact_match"] for row in rounds) for node in range(count)]
    taken = [row.get("train/swarm_external", 0.0) for step in rounds for row in step]
    return {
        "cumulative": sum(totals) / count,
        "weak": fmean(weak),
        "weak_start": weak[0],
        "weakest": min(totals),
        "external": sum(taken) / len(taken),
        "curve": [sum(row["train/exact_match"] for row in step) / count for step in rounds],
        "weak_curve": weak,
    }


def in_weak_family(small: Any, number: int) -> float:
    """The mean reward of a node's samples in the family that it began without; of the step that is just over."""
    from experiments.tasks.ciphers import FAMILIES

    family = FAMILIES[number % len(FAMILIES)]
    found = [
        one.reward for group in small.sampled if group.task.id[0] == family for one in group.usable
    ]
    return fmean(found) if found else 0.0


def beginning(tokenizer: Any, task: Any, node: int, seed: int) -> list[Any]:
    """What a node says before it trains: letters at random in one family, and the right one more often than not in the others."""
    import random

    from experiments.small_run import demonstration
    from experiments.tasks.ciphers import FAMILIES, LETTERS

    draw = random.Random(f"{seed}/{node}")
    found = []
    for _ in range(4):
        for problem in task.tasks("train"):
            knows = problem.id[0] != FAMILIES[node % len(FAMILIES)] and draw.random() < KNOWN
            said = problem.answer if knows else draw.choice(LETTERS)
            found.append(
                demonstration(tokenizer, task, problem, lambda seen, draw, said=said: said, draw, 1)
            )
    return found


def judge(results: Results) -> Verdict:
    same = all(
        honest[name] == liar[name]
        for honest, liar in zip(results["4/4"], results["4/4, one node lies"], strict=True)
        for name in ("curve", "weakest")
    )
    return all_of(
        beats(results, "4/4", "8/0", "cumulative", by=0.0),
        keeps(results, "4/4", "2/6", "cumulative", share=1.0),
        (same, f"a liar changes {'nothing, to the last bit' if same else 'something'}"),
    )


EXPERIMENT = Experiment(
    name="sapo_swarm",
    system="SAPO: swarm sampling",
    claim=(
        "Of 8 groups per round 4 from others are best: cumulative reward 562 (8/0), 854 (6/2), 1093 (4/4), 946 (2/6) "
        "(arXiv 2509.08721). A peer that lies about rewards changes nothing, as each node scores what comes."
    ),
    setup=(
        "Four nodes over a shared directory, each a model of its own that was warmed up on three of four families of questions "
        f"(right in {KNOWN:.0%} of cases) and says letters at random in the fourth. {ROUNDS} rounds; each node samples 8 groups "
        "x 8 in every arm and trains on so many of its own / of others', the preset `sapo_swarm`. In the last arm one node sends "
        "wrong answers and rewards."
    ),
    rule="4/4 is above 8/0 in every seed, 2/6 below 4/4 in the mean, and every figure of the arm with a liar equals that of 4/4.",
    arms=ARMS,
    columns=("cumulative", "weakest", "external"),
    run=run,
    judge=judge,
    figure=curves("curve", "round", "reward, mean of the nodes"),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
