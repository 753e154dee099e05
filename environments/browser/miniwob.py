"""Small web tasks in Chromium: the pages of MiniWoB++, from its package `miniwob`.

Source: Liu et al. 2018, Reinforcement Learning on Web Interfaces using Workflow-Guided Exploration
(arXiv 1802.08802). Rewards are the pages' own without their time penalty; a negative one is 0."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, MissingPackageError, did_you_mean, install_command
from rlflow.net.http import HttpClient
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.browser.actions import EXPECTED, parse_action
from rlflow_environments.browser.chromium import find_chromium
from rlflow_environments.browser.pool import Page, Pool, PoolOptions

FIRST = ("click-test-2", "click-button-sequence", "enter-text")
KEEPING = (
    *("book-flight", "book-flight-nodelay"),
    *("choose-date", "choose-date-easy", "choose-date-medium"),
    *("focus-text", "focus-text-2", "scroll-text", "scroll-text-2"),
    *("stock-market", "use-colorwheel", "use-colorwheel-2"),
)
"""Pages that show something of the episode before: they are loaded anew for each."""
UNSEEDED = ("click-pie",)
"""Pages that a seed does not repeat: they are not among `all`."""
PROMPT = "Actions on a web page, one per line: {expected}.\n"
NO_ACTION = f"No action: expected {EXPECTED}.\n"
NEXT = "Action:\n"


class MiniWob(Environment):
    """A policy reads the elements of a page as numbered lines and acts on them, an action a turn.
    The reward is the page's own at the end of its task, from 0 to 1.

    A page of the same task is the same for every attempt. The last action's page is over: what a
    picture shows is the page that the action was written for."""

    stop = ("\n",)
    harmless_options = ("tasks_per_split", "seed", "pictures")
    metrics = {
        "solved": Metric("share", "of pages whose task was done wholly", score=True),
        "finished": Metric("share", "of pages whose task was ended, well or badly"),
        "invalid_actions": Metric("per episode", "responses that were no action on the page"),
        "browser/restarts": Metric("count", "browsers that had to be replaced", "sum"),
        "browser/lost_pages": Metric("count", "pages that were lost with a failure", "sum"),
    }

    def __init__(
        self,
        pages: Sequence[str] | str = FIRST,
        tasks_per_split: PositiveInt = 512,
        *,
        pictures: bool = True,
        browsers: PositiveInt | None = None,
        at_once: PositiveInt = 64,
        timeout_s: PositiveFloat = 20.0,
        start_s: PositiveFloat = 60.0,
        program: str | None = None,
        seed: int = 0,
    ) -> None:
        """pages: names, or all. pictures: a screenshot of every turn, for `rlflow view`. browsers:
        processes; none: one per two processors. at_once: pages that are open at the same time;
        more episodes wait. timeout_s: of what a page does. start_s: of a browser and of a new
        page. program: a Chromium. Raises ConfigError, MissingPackageError."""
        self._folder = _pages_folder()
        names = self._names(pages)
        self._tasks = {
            split: [_task(names[at % len(names)], split, at, seed) for at in range(tasks_per_split)]
            for split in ("train", "val")
        }
        processes = browsers or max(1, len(os.sched_getaffinity(0)) // 2)
        self._options = PoolOptions(find_chromium(program), processes, at_once, timeout_s, start_s)
        self._pictures = pictures
        self._client: HttpClient | None = None
        self._pool: Pool | None = None
        self._reported = (0, 0)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    async def reset(self, task: Task) -> Episode:
        """A page of the task's kind and seed; what it shows ends the prompt."""
        document = self._folder / f"{task.metadata['page']}.html"
        page = await self._run(self._take, document.as_uri())
        episode = Episode(task, scratch={"page": page, "invalid": 0})
        try:
            seen = await self._run(page.call, f"rlflow.start({json.dumps(task.answer)})")
        except BaseException:
            await self.close(episode)
            raise
        prompt = f"{task.prompt}Task: {seen['goal']}\n{_shown(seen)}"
        episode.task = dataclasses.replace(task, prompt=prompt)
        return episode

    async def step(self, episode: Episode, response: str) -> Step:
        action, state = parse_action(response), episode.scratch
        page: Page = state["page"]
        picture = await self._run(page.picture) if self._pictures else ""
        if action is None:
            state["invalid"] += 1
            return Step(NO_ACTION + NEXT, metrics=_numbers(state), picture=picture)
        seen = await self._run(page.call, action)
        state["invalid"] += bool(seen["wrong"])
        if not seen["done"]:
            said = f"{seen['wrong']}\n" if seen["wrong"] else ""
            return Step(said + _shown(seen), metrics=_numbers(state), picture=picture)
        reward = max(0.0, float(seen["reward"]))
        numbers = _numbers(state) | {"solved": float(reward == 1.0), "finished": 1.0}
        return Step("", reward, True, numbers, picture=picture)

    async def close(self, episode: Episode) -> None:
        if self._pool is not None:
            used_up = episode.task.metadata["page"] in KEEPING
            await self._run(self._pool.give, episode.scratch["page"], used_up)

    def report(self) -> dict[str, float]:
        if self._pool is None:
            return {}
        now = (self._pool.restarts, self._pool.lost_pages)
        restarts, pages = (one - before for one, before in zip(now, self._reported, strict=True))
        self._reported = now
        return {"browser/restarts": float(restarts), "browser/lost_pages": float(pages)}

    def shutdown(self) -> None:
        client, pool, self._client, self._pool = self._client, self._pool, None, None
        if client is not None:
            if pool is not None:
                client.call(pool.close)
            client.close()

    async def _take(self, url: str) -> Page:
        if self._pool is None:
            self._pool = Pool(self._options)
        return await self._pool.take(url)

    async def _run(self, work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """The result of work in the browsers' loop: episodes may belong to any."""
        if self._client is None:
            self._client = HttpClient()
        return await asyncio.wrap_future(self._client.submit(work, *arguments))

    def _names(self, pages: Sequence[str] | str) -> list[str]:
        known = sorted(path.stem for path in self._folder.glob("*.html"))
        if pages == "all":
            return [name for name in known if name not in UNSEEDED]
        names = [pages] if isinstance(pages, str) else list(pages)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"environment.pages: no page '{name}' among the {len(known)} of miniwob."
                    f"{did_you_mean(str(name), known)}"
                )
        if not names:
            raise ConfigError("environment.pages: expected names of pages, or all; found none.")
        return names


def _pages_folder() -> Path:
    """Where the package keeps its pages; it is not imported. Raises MissingPackageError."""
    found = find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(
            "environment miniwob: the package 'miniwob' is not installed: "
            f"{install_command('miniwob')}"
        )
    return Path(found.submodule_search_locations[0]).resolve() / "html" / "miniwob"


def _task(page: str, split: str, number: int, seed: int) -> Task:
    """The seed of a page is its answer: of the run's seed, the split and the number."""
    name = f"{page}/{split}-{number}"
    return Task(name, PROMPT.format(expected=EXPECTED), f"{seed}/{name}", {"page": page})


def _shown(seen: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in seen["lines"]) + NEXT


def _numbers(state: Mapping[str, Any]) -> dict[str, float]:
    return {"solved": 0.0, "finished": 0.0, "invalid_actions": float(state["invalid"])}
