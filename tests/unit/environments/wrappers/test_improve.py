"""Claims about prompts that show an earlier solution."""

from __future__ import annotations

import asyncio

from rlflow_tools.kit.checks.environments import check_environment

from rlflow_environments.wrappers.improve import ImprovePrompts, improved
from tests.unit.environments.wrappers.small import Rooms, played


def begun(environment: ImprovePrompts) -> str:
    task = environment.tasks("train")[0]
    return asyncio.run(environment.reset(task)).task.prompt


def test_the_best_solution_so_far_is_shown_with_its_output() -> None:
    environment = ImprovePrompts(Rooms(), 1.0)
    assert begun(environment) == "Walk 0. "  # there is none yet
    played(environment, "on", "on out")
    played(environment, "out")  # a worse one
    shown = begun(environment)
    assert shown.startswith(
        "Walk 0. \n\nAn earlier solution:\non out\n\nWhat came of it:\nYou are in room 2."
    )
    assert shown.endswith("Write a better one.")
    played(environment, "on", "on out", split="val")
    assert set(environment._known) == {"train0"}  # a held-out task is never told what came of it
    latest = ImprovePrompts(Rooms(), 1.0, latest=True)
    played(latest, "on", "on out")
    played(latest, "out")
    assert "\nout\n" in begun(latest)


def test_rewards_are_the_bases_and_the_gain_is_told() -> None:
    environment = ImprovePrompts(Rooms(), 1.0)
    first = played(environment, "on out")
    assert (
        first[-1].reward == 1.0
        and first[-1].metrics["improving"] == 0
        and "improvement" not in first[-1].metrics
    )
    again = played(environment, "on", "on", "on out")
    assert again[-1].reward == 3.0 and again[-1].metrics["improvement"] == 2.0
    cut = played(environment, "on", turns_left=0)  # a limit ended it
    assert cut[-1].metrics["improvement"] == -3.0


def test_a_share_of_the_episodes_begins_from_scratch() -> None:
    environment = ImprovePrompts(Rooms(), 0.5)
    played(environment, "out")
    shown = sum("earlier solution" in begun(environment) for _ in range(200))
    assert 70 < shown < 130
    never = ImprovePrompts(Rooms(), 0.0)
    played(never, "out")
    assert begun(never) == "Walk 0. "


def test_the_last_message_of_a_conversation_is_extended() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Do {it}."}]
    first, last = improved(prompt, "{r}", "o")
    assert (
        first == prompt[0]
        and last["content"].startswith("Do {it}.\n\nAn earlier solution:\n{r}")
        and len(prompt[1]) == 2
    )


def test_it_keeps_the_contract_of_environments() -> None:
    report = check_environment(ImprovePrompts(Rooms()), episodes=4)
    assert report.passed, str(report)
