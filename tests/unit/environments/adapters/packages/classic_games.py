"""Environments of verifiers 0.1.14 to 0.3, as their packages offer them: `load_environment` of a module on the path."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTIONS = [
    {"question": f"Reverse the word {word}.", "answer": word[::-1]}
    for word in ("abc", "stop", "live", "tar")
]
NUMBERS = [
    {"question": "Which number from 1 to 9?", "answer": str(number)} for number in range(1, 10)
]


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


def letters(completion: Any, answer: str) -> float:
    """The share of the answer's letters."""
    said = completion[-1].content
    return sum(letter in said for letter in answer) / len(answer)


def together(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


class Guess(vf.MultiTurnEnv):
    """Higher or lower; `rewritten` makes it forget the question, which no sequence of tokens can follow. Some numbers fail."""

    def __init__(self, rewritten: bool = False, **keywords: Any) -> None:
        super().__init__(max_turns=4, **keywords)
        self._rewritten = rewritten
        self.cleaned = 0

    async def setup_state(self, state: vf.State) -> vf.State:
        state["hints"] = []
        return state

    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        said = messages[-1].content.strip()
        if said == "tool":
            raise vf.ToolCallError("no such tool")
        if said == "infra":
            raise vf.InfraError("the sandbox is gone")
        if said == "noted":
            state["error"] = vf.InfraError("the disk is full")
            return [{"role": "user", "content": "Sorry."}]
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        state["hints"].append("higher" if said < state["answer"] else "lower")
        return [{"role": "user", "content": state["hints"][-1]}]

    async def get_prompt_messages(self, state: vf.State) -> Any:
        found = await super().get_prompt_messages(state)
        return found[1:] if self._rewritten and state["trajectory"] else found

    @vf.cleanup
    async def count(self, state: vf.State) -> None:
        self.cleaned += 1


async def found(state: vf.State) -> float:
    return float(state.get("final_env_response") is not None)


async def hints(state: vf.State) -> float:
    return float(len(state["hints"]))


def square(number: int) -> int:
    """The square of a number.

    Args:
        number: which
    """
    return number * number


def load_environment(kind: str = "single", **options: Any) -> vf.Environment:
    if kind == "single":
        rubric = vf.Rubric(funcs=[exact, letters], weights=[1.0, 0.5])
        return vf.SingleTurnEnv(
            dataset=Dataset.from_list(QUESTIONS), system_prompt="Answer in one word.", rubric=rubric
        )
    if kind == "multi":
        rubric = vf.Rubric(funcs=[found, hints], weights=[1.0, -0.1])
        return Guess(
            dataset=Dataset.from_list(NUMBERS),
            eval_dataset=Dataset.from_list(NUMBERS[:2]),
            rubric=rubric,
            **options,
        )
    if kind == "tools":
        return vf.ToolEnv(
            dataset=Dataset.from_list(QUESTIONS), tools=[square], rubric=vf.Rubric(funcs=[letters])
        )
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(QUESTIONS), rubric=vf.Rubric(funcs=[together])
    )
