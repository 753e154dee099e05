"""ONI: intrinsic rewards from a labeller behind an endpoint, on a task whose end alone is rewarded."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, average, beats, values
from experiments.curves import at_the_end, curves

ROOMS, TURNS = 5, 7
STEPS = 40
GOAL = "Find the exit, room by room."
KILLED = "retrieval, annotator killed half way"
MODELS: dict[str, Any] = {
    "extrinsic only": None,
    "retrieval": "retrieval",
    "classification": {"name": "classifier", "lr": 1e-3},
    "ranking": {"name": "ranking", "lr": 1e-3},
    KILLED: "retrieval",
}
_CAPTION = re.compile(r"(?:message|first|second) \"([A-D] [a-z 0-9]+)\"")


def progress_of(caption: str) -> int:
    """How far the rules of the labeller think that a caption is: its room, and the exit beyond all; 0 for a wall."""
    if caption.endswith("exit"):
        return 99
    found = re.search(r"room (\d)", caption)
    return int(found[1]) if found else 0


def labelled(prompt: str) -> str:
    """What a language model would say: FOO for a caption that is progress, or for the first of two if it is more."""
    found = [progress_of(caption) for caption in _CAPTION.findall(prompt)]
    if len(found) == 1:
        return f"By the rules. {'FOO' if found[0] else 'BAR'}"
    first, second = found
    return "Nobody can say." if first == second else f"By the rules. {'FOO' if first > second else 'BAR'}"


def run(arm: str, seed: int, quick: bool) -> Figures:
    """success: at the end; rooms: doors found per episode at the end; labels: that the annotator had; steps: that were made."""
    from experiments.small_run import CRITIC, small_run, some_demonstrations
    from experiments.tasks.rooms import REFERENCE, Rooms
    from recipes.rule_server import RuleServer

    task = Rooms(ROOMS, TURNS, seed)
    environment: dict[str, Any] = {"name": REFERENCE, "rooms": ROOMS, "turns": TURNS, "seed": seed}
    steps = 2 if quick else STEPS
    with ExitStack() as stack:
        server = stack.enter_context(RuleServer(labelled))
        if MODELS[arm] is not None:
            endpoint = {"url": server.url, "model": "rules", "timeout_s": 5.0}
            environment = {"name": "intrinsic", "base": environment, "goal": GOAL, "endpoint": endpoint, "model": MODELS[arm],
                           "extrinsic": 10.0}  # fmt: skip
        overrides = (CRITIC, "rollout.prompts_per_step=4")
        small = stack.enter_context(small_run(seed, environment, task.characters, *overrides, preset="oni"))
        small.warm_up(some_demonstrations(small, task, task.go_anywhere, seed, TURNS), 4 if quick else 20)
        rows = []
        for step in range(steps):
            if arm == KILLED and step == steps // 2:
                server.close()
            rows.append(small.step())
    curve = [row["train/success"] for row in rows]
    return {
        "success": at_the_end(curve),
        "rooms": at_the_end([row["rollout/rooms"] for row in rows]),
        "labels": rows[-1].get("intrinsic/labels", 0.0),
        "steps": float(len(rows)),
        "aborted": sum(row.get("rollout/aborted", 0.0) for row in rows),
        "curve": curve,
    }


def judge(results: Results) -> Verdict:
    steps, aborted = (values(results, KILLED, name) for name in ("steps", "aborted"))
    went_on = min(steps) == STEPS and not any(aborted)
    models = ("retrieval", "classification", "ranking")
    success = average(results, KILLED, "success")
    left = f"with the annotator dead, success is {success:.3g} and {min(steps):.0f} of {STEPS} steps were made"
    return all_of(*(beats(results, model, "extrinsic only") for model in models), (went_on, left))


EXPERIMENT = Experiment(
    name="oni",
    system="ONI: intrinsic rewards from a language model, online",
    claim=(
        "It solves sparse tasks that the extrinsic reward does not, retrieval being about as good as classification and ranking "
        "(NetHack; arXiv 2410.23022)."
    ),
    setup=(
        f"Four wings of {ROOMS} rooms, five directions in each, {TURNS} turns; the exit is worth 1 (1 in 210 episodes by "
        f"chance). {STEPS} steps of 32 episodes, the preset `oni`, the wrapper `intrinsic` with 10 x extrinsic and 0.4 x "
        "intrinsic / N^3. The labeller is a server of rules behind the OpenAI-compatible protocol. Learned models have a rate of "
        "1e-3 in place of 1e-4: they make some hundred updates."
    ),
    rule=(
        "Each of the three models is above extrinsic only in every seed, by 0.05 in the mean, and the run whose annotator is "
        "killed makes all of its steps without an aborted episode."
    ),
    arms=tuple(MODELS),
    columns=("success", "rooms", "labels", "aborted"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="success"),
    imports=(*TRAINING, "experiments.small_run"),
    version=2,
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
