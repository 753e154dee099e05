"""Environments of verifiers 0.1.14 to 0.3.1, driven message by message.

Source: `envs/multiturn_env.py` (the loop of `rollout`) and `envs/environment.py` (what is cleaned
up and scored, and when).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, described
from rlflow.types import Episode, Step, Task
from rlflow_environments.adapters.verifiers.shared import (
    METRICS,
    VerifiersError,
    as_message,
    split_rows,
)
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.tool_calls import tool_schema


class VerifiersEnvironment(Environment):
    """The environment that `load_environment` of a package returned."""

    metrics = METRICS

    def __init__(self, library: Any, name: str, environment: Any) -> None:
        self._environment = environment
        if problem := _unfit(library, environment):
            raise ConfigError(f"environment.environment: '{name}' {problem}.")
        self.max_turns = environment.max_turns if environment.max_turns > 0 else None
        self.tools = tuple(
            tool_schema(tool.name, tool.description, tool.parameters)
            for tool in environment.tool_defs or ()
        )
        rows, held_out = list(environment.build_dataset() or []), environment.build_eval_dataset()
        self._rows = split_rows(rows)
        if held_out is not None:
            self._rows = {"train": rows, "val": list(held_out)}
        self._tool_error: type[Exception] = library.ToolError
        self._client = _no_model(importlib.import_module("verifiers.clients").Client)

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                f"{split}-{number}",
                [as_message(message) for message in row["prompt"]],
                row.get("answer"),
                {"split": split, "number": number},
            )
            for number, row in enumerate(self._rows[split])
        ]

    async def reset(self, task: Task) -> Episode:
        """A rollout's state of its own; the environment may change the prompt."""
        theirs, row = self._environment, self._rows[task.metadata["split"]][task.metadata["number"]]
        state = await theirs.init_state(row, self._client, "policy", {})
        state = await theirs.setup_state(state) or state
        prompt = await theirs.get_prompt_messages(state)
        shown = dataclasses.replace(task, prompt=[as_message(message) for message in prompt])
        return Episode(shown, scratch={"state": state, "prompt": prompt, "open": True})

    async def step(self, episode: Episode, response: str) -> Step:
        theirs = self._environment
        state, prompt = episode.scratch["state"], episode.scratch["prompt"]
        await theirs.add_model_response(state, prompt, self._response(response, episode))
        if await theirs.is_completed(state):
            return await self._scored(episode)
        if episode.turns_left == 0:  # truncated: what it would show, nobody reads
            return await self._scored(episode, terminated=False)
        before = [*prompt, *state["trajectory"][-1]["completion"]]
        try:
            following = list(await theirs.get_prompt_messages(state))
        except self._tool_error as problem:  # of the policy's call: as their rollout, it is scored
            state["error"] = problem
            return await self._scored(episode)
        if await theirs.is_completed(state):  # `final_env_response` is one of the conditions
            return await self._scored(episode)
        if following[: len(before)] != before:
            raise VerifiersError(
                "the environment rewrites earlier messages, which one sequence of tokens cannot "
                "hold."
            )
        episode.scratch["prompt"] = following
        return Step([as_message(message) for message in following[len(before) :]])

    async def close(self, episode: Episode) -> None:
        if episode.scratch.pop("open", False):
            await self._environment.cleanup(episode.scratch["state"])
            await self._environment.rubric.cleanup(episode.scratch["state"])

    async def _scored(self, episode: Episode, terminated: bool = True) -> Step:
        """The last step, in the order of their `run_rollout`: clean up, score, clean the rubric
        up. Raises VerifiersError where the rollout ended with an error that is none of a tool's:
        what the rubric makes of it is no verdict."""
        theirs, state = self._environment, episode.scratch["state"]
        error = state.get("error")
        if error is not None and not isinstance(error, self._tool_error):
            raise VerifiersError(f"the environment failed: {described(error)}")
        episode.scratch["open"] = False
        await theirs.cleanup(state)
        await theirs.rubric.score_rollout(state)
        await theirs.rubric.cleanup(state)
        reward = float(state["reward"])
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Step(reward=reward, terminated=terminated, metrics={**metrics, "rubric": reward})

    def _response(self, text: str, episode: Episode) -> Any:
        """The response as their client would have returned it: text, and tool calls in the form of
        Qwen and Hermes."""
        types = importlib.import_module("verifiers.types")
        calls = []
        for number, block in enumerate(blocks("tool_call", text) if self.tools else ()):
            try:
                call = json.loads(block)
                name, arguments = str(call["name"]), json.dumps(call.get("arguments", {}))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue  # as a server does that cannot read a call: it stays text
            calls.append(
                types.ToolCall(id=f"call-{episode.turns}-{number}", name=name, arguments=arguments)
            )
        message = types.ResponseMessage(
            content=text.partition("<tool_call>")[0] if calls else text,
            tool_calls=calls or None,
            finish_reason="length" if episode.cut else "tool_calls" if calls else "stop",
            is_truncated=episode.cut,
        )
        return types.Response(
            id=f"{episode.task.id}-{episode.turns}",
            created=int(time.time()),
            model="policy",
            message=message,
        )


def _unfit(library: Any, environment: Any) -> str:
    """Why an environment cannot be played step by step; "" where it can."""
    if not isinstance(environment, library.MultiTurnEnv):
        found = type(environment).__name__
        expected = "expected a SingleTurnEnv or MultiTurnEnv"
        return f"is a {found}, which has a rollout of its own; {expected}"
    if not hasattr(environment, "cleanup"):
        advice = "pip install 'verifiers>=0.1.14,<0.4'"
        return f"comes with a verifiers that is too old; expected 0.1.14 or later: {advice}"
    if type(environment).get_model_response is not library.Environment.get_model_response:
        own = "a way of its own (get_model_response)"
        return f"asks the model in {own}, which the policy's tokens do not pass through"
    if any(
        environment.rubric._is_group_func(function)
        for function in environment.rubric._get_reward_funcs()
    ):
        return "scores groups of rollouts together, and a reward here is an episode's own"
    return ""


def _no_model(client: type) -> Any:
    """A client for environments that want one; it answers nobody."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise VerifiersError("the environment asks the model by itself, past the policy's tokens.")

    methods = dict.fromkeys(client.__abstractmethods__, refuse)  # type: ignore[attr-defined]
    return type("NoModel", (client,), methods)(None)
