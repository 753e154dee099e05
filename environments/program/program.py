"""An agent of the user's own, which asks the policy through an endpoint, as an environment."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rlflow.components import Kind, names_code
from rlflow.environment import MAX_REWARD
from rlflow.errors import ConfigError, PolicyError, did_you_mean, install_command, needing
from rlflow.net.calls import CallThreads, call
from rlflow.storage.child import Guard
from rlflow.texts import one_line
from rlflow.types import Episode, Observation, Task
from rlflow.values import PositiveFloat
from rlflow_environments.common.jsonl import BadRow, held_out, read_each
from rlflow_environments.endpoint import AgentSession, Endpoint
from rlflow_environments.program.agents import AgentEnvironment
from rlflow_environments.program.running import (
    BLAMES_POLICY,
    AgentProcess,
    AgentTask,
    ProgramError,
    last_lines,
)

logger = logging.getLogger(__name__)

AGENT = Kind("agent", call=2)
"""`async def agent(task, client)`, the task a dict, the client an openai.AsyncOpenAI."""
REWARD = Kind("reward", call=2)
"""`def reward(task, played)`, async or not: a number. played: `output`, `returned`, `messages`."""
RUN_MARK = "RLFLOW_AGENTS"
"""Variable by which a guard knows all programs of an environment, whatever sessions they are in."""
PROMPTS = ("prompt", "question", "instruction", "problem")
"""Keys of a row whose text stands for the task in displays."""
SHOWN = ("id", "messages", *PROMPTS)
"""Keys of a row that the agent sees, with those of `agent_keys`; the reward sees all."""
HELD_BACK = ("agent", "answer", "answers", "solution", "solutions")
"""Keys that nobody expects an agent to see."""
MOST_NAMED, LONGEST_NAME = 10, 40
JUDGES = 256
"""Rewards at the same time, where their function is not async."""


class ProgramEnvironment(AgentEnvironment):
    """agent: a command, started for each episode, or `file.py:function` of this process; a row may
    have an `agent` of its own. train, val: files of JSON rows; without val every tenth of train's.
    agent_keys: of a row, which the agent sees beside SHOWN; nothing else reaches it. reward:
    `file.py:function`. reward_command: see `verdict_of`. Without either the agent posts its reward,
    or returns it.

    messages: `text` where the model has no chat template. sampling: what becomes of parameters that
    training cannot honour. timeout_s: between two requests, and of a reward. variables: for the
    programs' environment."""

    shorthand = "agent"

    def __init__(
        self,
        agent: str | None = None,
        train: str | Path | None = None,
        val: str | Path | None = None,
        *,
        agent_keys: Sequence[str] = (),
        reward: str | None = None,
        reward_command: str | None = None,
        messages: Literal["template", "text"] = "template",
        sampling: Literal["refuse", "ignore"] = "refuse",
        timeout_s: PositiveFloat = 300.0,
        variables: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Raises ConfigError, DataError, MissingPackageError."""
        if reward is not None and reward_command is not None:
            raise ConfigError("environment: expected reward or reward_command, found both.")
        super().__init__(messages == "text", sampling == "ignore", timeout_s, host, port)
        files = {"train": train, "val": val}
        given = {split: path for split, path in files.items() if path is not None}
        rows = {split: read_each(path, "tasks", _row) for split, path in given.items()}
        self._agent = agent
        without = agent is None and any("agent" not in row for own in rows.values() for row in own)
        if without or not rows:
            raise ConfigError(
                "environment program: expected agent=COMMAND or agent=file.py:function, and "
                "train=ROWS.jsonl or val=ROWS.jsonl of tasks."
            )
        self._shown = frozenset((*SHOWN, *agent_keys))
        _check_keys([row for own in rows.values() for row in own], agent_keys, self._shown)
        tasks = {split: self._made(split, own) for split, own in rows.items()}
        self._tasks = tasks if "val" in tasks else held_out(tasks["train"])
        agents = {row.get("agent", agent or "") for own in rows.values() for row in own}
        self._functions = {
            name: _function(name) for name in agents if _is_code(name, "environment.agent")
        }
        if reward_command is not None:
            _is_code(reward_command, "environment.reward_command")
        self._has_programs = len(self._functions) < len(agents)
        self._mark = secrets.token_hex(8)
        self._reward = REWARD.resolve(reward, "environment.reward") if reward else None
        self._reward_command = reward_command
        self._variables = dict(variables or {})
        if self._functions:
            with needing("agents of this process", install_command("agents")):
                importlib.import_module("openai")

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        """The tasks for validation are those at `path`."""
        return {"val": path, "train": None}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def _made(self, split: str, rows: Sequence[dict[str, Any]]) -> list[Task]:
        tasks = []
        for number, row in enumerate(rows):
            shown = str(self._shown_of(row))
            text = next((row[key] for key in PROMPTS if isinstance(row.get(key), str)), shown)
            prompt: Observation = text if self._plain else [{"role": "user", "content": text}]
            name = str(row.get("id", f"{split}-{number}"))
            tasks.append(Task(name, prompt, row.get("answer"), {"row": row}))
        return tasks

    def _shown_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """What the agent sees of a row."""
        return {key: value for key, value in row.items() if key in self._shown}

    async def begin(self) -> Endpoint:
        self._judges = CallThreads(JUDGES, "reward")
        self.held.callback(self._judges.close)
        if self._has_programs:
            self.held.callback(Guard(f"{RUN_MARK}={self._mark}").close)
        return await super().begin()

    async def start(self, task: Task, session: AgentSession, url: str) -> AgentProcess | AgentTask:
        row = task.metadata["row"]
        given = {"id": task.id, **self._shown_of(row)}
        agent: str = row.get("agent", self._agent)
        if agent in self._functions:
            return AgentTask(self._functions[agent], given, self.client(session, url))
        names = ("NO_PROXY", "no_proxy")
        bypassed = [*filter(None, map(os.environ.get, names)), "127.0.0.1", "localhost"]
        variables = {
            **dict.fromkeys(names, ",".join(bypassed)),
            **self._variables,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            RUN_MARK: self._mark,
            "RLFLOW_EPISODE": f"{one_line(task.id, 100)}/{secrets.token_hex(8)}",
        }
        return await AgentProcess.start(
            f"agent of {one_line(task.id, 100)}", agent, given, variables
        )

    async def score(self, episode: Episode) -> float:
        state, task = episode.scratch, episode.task
        agent, session = state["agent"], state["session"]
        found: Any = agent.returned
        if self._reward is not None:
            played = {"output": agent.output, "returned": found, "messages": session.messages}
            given = (task.metadata["row"], played)
            what = "environment.reward (limit: environment.timeout_s)"
            found = await call(self._judges, self._reward, given, self._timeout_s, what)
        elif self._reward_command is not None:
            if not isinstance(agent, AgentProcess):
                raise ConfigError("environment.reward_command: the agent is no program.")
            found = verdict_of(*await agent.judge(self._reward_command, self._timeout_s))
        elif session.posted is not None:
            found = session.posted["reward"]
        elif session.truncated and _number(found) is None:
            return 0.0
        number = _number(found)
        if number is None or not abs(number) <= MAX_REWARD:
            raise ProgramError(
                f"the episode has no reward: expected a number to {MAX_REWARD:g} from "
                "environment.reward or reward_command, or one that the agent posts to "
                f"$OPENAI_BASE_URL/reward or returns; found {found!r:.60}; the agent's output: "
                f"{agent.last_lines()}"
            )
        return number


def _row(row: dict[str, Any], line: int) -> dict[str, Any]:
    if not isinstance(row.get("agent", ""), str):
        raise BadRow(f"'agent': expected text, found {row['agent']!r:.40}")
    return row


def _is_code(agent: str, option: str) -> bool:
    """Whether it names a function, else it is a command. Raises ConfigError for neither."""
    try:
        words, told = shlex.split(agent), "nothing"
    except ValueError as problem:
        words, told = [], f"{agent!r:.80} ({problem})"
    if not words:
        raise ConfigError(f"{option}: expected a command, found {told}.")
    return names_code(agent) and len(words) == 1


def _function(name: str) -> Any:
    found = AGENT.resolve(name, "environment.agent")
    if not inspect.iscoroutinefunction(inspect.unwrap(found)):
        raise ConfigError(
            f"environment.agent: '{name}': expected `async def`, found {type(found).__name__}; a "
            "plain function would hold up all episodes. Run it as a command, or make it async."
        )
    return found


def _number(found: Any) -> float | None:
    """As a number, of numpy's types too; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return None if isinstance(found, (str, bytes)) else float(found)
    return None


def verdict_of(code: int, output: str, errors: str) -> float:
    """What a reward command says. Exit code 0: the number on its last line of stdout, else 1. Exit
    code 1, with nothing on stderr and no other number: 0.

    Raises PolicyError for BLAMES_POLICY, ProgramError for any other end, which is no verdict."""
    number = None
    with contextlib.suppress(ValueError, IndexError):
        number = float(output.strip().splitlines()[-1])
    if code == 0:
        return 1.0 if number is None else number
    if code == 1 and not errors.strip() and not number:
        return 0.0
    wrote = last_lines(f"{output}\n{errors}")
    if code == BLAMES_POLICY:
        raise PolicyError(f"environment.reward_command ended with code {code}: {wrote}")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    raise ProgramError(
        f"environment.reward_command {how}, which is no verdict: {wrote}; expected exit code 0 "
        "with the reward on the last line of stdout, or exit code 1 with nothing on stderr for 0"
    )


def _check_keys(
    rows: Sequence[dict[str, Any]], agent_keys: Sequence[str], shown: frozenset[str]
) -> None:
    """Says which keys the agent does not see. Raises ConfigError for one to show that no row
    has."""
    there = {key: None for row in rows for key in row}
    for key in agent_keys:
        if key not in there:
            raise ConfigError(
                f"environment.agent_keys: no row has '{key}'.{did_you_mean(key, there)}"
            )
    hidden = [key for key in there if key not in shown]
    if not hidden:
        return
    names = ", ".join(f"{key[:LONGEST_NAME]!r}" for key in hidden[:MOST_NAMED])
    more = f" and {len(hidden) - MOST_NAMED} more" if len(hidden) > MOST_NAMED else ""
    unknown = any(key not in HELD_BACK for key in hidden)
    logger.log(
        logging.WARNING if unknown else logging.INFO,
        "the agent does not see %s%s of its task: environment.agent_keys names those that it needs",
        names,
        more,
    )
