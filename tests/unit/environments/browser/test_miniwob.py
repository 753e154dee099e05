"""Pages of MiniWoB++ in real Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import shutil
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.types import Episode, Task
from rlflow_environments.browser import pool
from rlflow_environments.browser.chromium import BrowserError
from rlflow_environments.browser.miniwob import FIRST, MiniWob
from rlflow_environments.browser.player import play

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("chromium") is None, reason="no chromium: apt install chromium"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("miniwob") is None,
        reason="no package miniwob: the extra 'miniwob'",
    ),
]


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[MiniWob]:
    made = MiniWob(
        **{"tasks_per_split": 64, "browsers": 1, "timeout_s": 60.0, "start_s": 120.0, **options}
    )
    try:
        yield made
    finally:
        made.shutdown()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def played(made: MiniWob, task: Task, most_turns: int = 6) -> float:
    """The player's return."""
    episode, said, generator = await made.reset(task), [], random.Random(task.id)
    try:
        for _ in range(most_turns):
            response = play(str(episode.task.prompt), said, generator, False)
            step = await made.step(episode, response)
            said.append((response, step.observation))
            if step.terminated:
                return step.reward
        return 0.0
    finally:
        await made.close(episode)


def test_sixty_four_episodes_at_once_are_solved_by_the_player() -> None:
    """Among places for 16 too, where the others wait."""
    for at_once in (64, 16):
        with opened(at_once=at_once) as made:

            async def all_of(made: MiniWob = made) -> list[float]:
                return await asyncio.gather(*[played(made, task) for task in made.tasks("train")])

            assert run(all_of()) == [1.0] * 64
            assert made.report() == {"browser/restarts": 0.0, "browser/lost_pages": 0.0}


def test_the_contract_holds() -> None:
    with opened(tasks_per_split=12) as made:
        report = check_environment(made, episodes=8, player=play)
    assert report.passed, str(report)
    assert "the player: 8 episodes, 8 terminated, mean return 1" in str(report)


def test_a_seed_is_a_page_whatever_happened_in_its_tab_before() -> None:
    """All pages of the package: each in a new document, and after another seed with any actions."""

    async def page_of(made: MiniWob, task: Task, actions: int = 0) -> str:
        episode, draw = await made.reset(task), random.Random(task.metadata["page"])
        seen = str(episode.task.prompt)
        with contextlib.suppress(BrowserError):
            for _ in range(actions):
                number = draw.randint(1, seen.count("\n") - 1)
                kinds = [f"click {number}"] * 4 + [f"type {number} abc", "scroll down"]
                step = await made.step(episode, draw.choice(kinds))
                if step.terminated:
                    break
                seen = str(step.observation)
        await made.close(episode)
        return str(episode.task.prompt)

    async def all_pages(made: MiniWob) -> None:
        count = len(made.tasks("train")) // 2
        first, second = made.tasks("train")[:count], made.tasks("train")[count:]
        assert count > 120
        same, wrong = 0, []
        for one, other in zip(first, second, strict=True):
            new = await page_of(made, one)
            same += await page_of(made, other, actions=10) == new
            if await page_of(made, one) != new:
                wrong.append(one.metadata["page"])
        assert not wrong  # else they belong into KEEPING of miniwob.py
        assert same < count / 2  # seeds do differ

    with opened() as listing:
        count = len(listing._names("all"))
    with opened(pages="all", tasks_per_split=2 * count, pictures=False) as made:
        run(all_pages(made))


async def faulty(made: MiniWob, fault: str) -> str:
    """The error of an episode whose page has the fault when it is clicked; others go on after it."""
    episode = await made.reset(made.tasks("train")[0])
    await made._run(
        episode.scratch["page"].call,
        f"document.querySelector('#subbtn').onclick = () => {{ {fault} }}",
    )
    return await failed(made, episode)


async def failed(made: MiniWob, episode: Episode) -> str:
    told = ""
    try:
        for number in (1, 2):
            await made.step(episode, f"click {number}\n")
    except BrowserError as error:
        told = str(error)
    await made.close(episode)
    return told


def processes(made: MiniWob) -> int:
    """The browser's main process."""
    assert made._pool is not None and made._pool._places[0].browser is not None
    child = made._pool._places[0].browser._child
    assert child is not None
    return child.pid


@pytest.mark.parametrize(
    "fault", ["for (;;) {}", "alert('boo')", "setTimeout(() => { for (;;) {} }, 0)"]
)
def test_a_page_that_hangs_or_asks_costs_its_episode_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises, which aborts the episode; the next one is played, in the same browser or another."""
    with opened(pages=["click-test-2"], timeout_s=5.0) as made:

        async def both() -> tuple[str, float]:
            return await faulty(made, fault), await played(made, made.tasks("train")[1])

        told, reward = run(both())
        assert "no answer to" in told or "opened a dialog: boo" in told
        assert reward == 1.0 and made.report()["browser/lost_pages"] >= 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_browser_that_is_stopped_or_killed_is_replaced(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALIVE_S", 2.0)
    with opened(pages=["click-test-2"], timeout_s=5.0) as made:

        async def all_of() -> tuple[list[str], float]:
            episodes = [await made.reset(task) for task in made.tasks("train")[:4]]
            before = processes(made)
            os.kill(before, number)
            told = await asyncio.gather(*[failed(made, episode) for episode in episodes])
            reward = await played(made, made.tasks("train")[5])
            assert processes(made) != before
            return told, reward

        told, reward = run(all_of())
        assert all("chromium: " in one for one in told) and reward == 1.0
        assert made.report()["browser/restarts"] == 1.0


def test_a_policy_reads_types_scrolls_and_is_told_what_was_wrong() -> None:
    async def some(made: MiniWob) -> None:
        [task] = [task for task in made.tasks("train")[:3] if task.metadata["page"] == FIRST[2]]
        episode = await made.reset(task)
        assert '1 input ""\n2 button "Submit"\nAction:\n' in str(episode.task.prompt)
        quoted = 'a "b" \\ é'
        step = await made.step(episode, f"type 1 {quoted}\n")
        assert step.observation.startswith('1 input "a \\"b\\" \\\\ é"\n')
        assert step.picture.startswith("data:image/jpeg;base64,") and not step.terminated
        for response, said in (
            ("type 2 x\n", "Text cannot be typed there.\n1 input"),
            ("click 7\n", "There is no element 7.\n1 input"),
            ("press 1\n", "No action: expected click N"),
            ("scroll down\n", "1 input"),
        ):
            step = await made.step(episode, response)
            assert step.observation.startswith(said) and step.reward == 0.0
        step = await made.step(episode, "click 2\n")
        assert (
            step.reward,
            step.terminated,
            step.metrics["solved"],
            step.metrics["invalid_actions"],
        ) == (
            0,
            True,
            0,
            3,
        )
        await made.close(episode)

    with opened() as made:
        run(some(made))


@pytest.mark.parametrize(
    ("page", "action", "shown"),
    [
        ("social-media", "scroll up", 'span "retweet"'),
        ("sign-agreement", "scroll up", '…"'),
        ("scroll-text", "type 9 x", '."\n2 input'),  # whole, to its last word
        ("book-flight", "scroll up", 'input "" (From:)'),
        ("email-inbox-nl-turk", "scroll up", ""),
        ("choose-date", "type 2 01/02/2016", "Text cannot be typed there."),
        ("enter-date", "type 1 08/19/2016", "It takes YYYY-MM-DD."),
        ("enter-date", "type 1 2016-08-19", 'input "2016-08-19"'),
        ("enter-time", "type 1 1:52 PM", "It takes HH:MM."),
    ],
)
def test_a_page_shows_what_its_task_needs_and_says_what_it_takes(
    page: str, action: str, shown: str
) -> None:
    async def some(made: MiniWob) -> None:
        episode = await made.reset(made.tasks("train")[0])
        assert "{" not in str(episode.task.prompt)
        assert shown in (await made.step(episode, f"{action}\n")).observation
        await made.close(episode)

    with opened(pages=[page], tasks_per_split=1, pictures=False) as made:
        run(some(made))
