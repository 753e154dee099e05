"""Agents of the contract check: random words, odd texts, the task's answer, a scripted player."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.types import Task

Said = Sequence[tuple[str, Any]]
"""(response, observation) of each turn so far."""
Agent = Callable[[Task, Task, Said], str]
"""(task, what `reset` made of it, said) -> the next response. Pure, so that an episode can be
played again."""
_ODD_TEXTS = ("", " \n", "ü漢字🙂 \u202e\x00", "<answer></answer><tool>", "x" * 5000)


def prompt_text(task: Task) -> str:
    """The task's prompt without roles."""
    if isinstance(task.prompt, str):
        return task.prompt
    return " ".join(str(message.get("content", "")) for message in task.prompt)


def random_agent(environment: Environment, seed: int) -> Agent:
    """Random words of the prompt, digits and odd characters, now and then with a stop string."""

    def respond(task: Task, shown: Task, said: Said) -> str:
        generator = random.Random(f"{seed}/{task.id}/{len(said)}")
        words = [*prompt_text(task).split(), *"0123456789", "yes", "no", "é"]
        text = " ".join(generator.choices(words, k=generator.randint(1, 8)))
        ends = [*environment.stop, ""]
        return text + generator.choice(ends)

    return respond


def scripted_agent(environment: Environment) -> Agent:
    """Texts that programs forget: empty, blank, odd characters, half-open tags, very long, a bare
    stop string."""
    texts = [*_ODD_TEXTS, *environment.stop]
    return lambda task, shown, said: texts[(len(said) + sum(task.id.encode())) % len(texts)]


def answering_agent(environment: Environment) -> Agent:
    """The task's own answer: bare, then between the tags of each stop string that closes one."""

    def respond(task: Task, shown: Task, said: Said) -> str:
        several = isinstance(task.answer, (list, tuple)) and task.answer
        answer = task.answer[0] if several else task.answer
        ends = [end for end in reversed(environment.stop) if end[:2] == "</" and end[-1] == ">"]
        forms = [*(f"<{end[2:-1]}>{answer}{end}" for end in ends), str(answer)]
        return forms[len(said) % len(forms)]

    return respond


def player_agent(player: Callable[..., str], seed: int) -> Agent:
    """A scripted player of `rlflow env policy`, at its best."""

    def respond(task: Task, shown: Task, said: Said) -> str:
        generator = random.Random(f"{seed}/{task.id}/{len(said)}")
        response = player(prompt_text(shown), list(said), generator, False)
        if not isinstance(response, str):
            raise TypeError(f"expected the text of a response, found {response!r:.80}")
        return response

    return respond
