"""The supervised warm-up of the starting policy: which training rows to draw at which point of the schedule.

Copying names that were never seen before is the skill that all else rests on, and the last one that a tiny model learns. So it
is drilled alone first, then on short traces, then on full ones; only at the very end the traces turn clumsy, which spoils the
behaviour and not the skill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlflow.types import Segment, StopReason, Trajectory
from rlflow_environments.search.demonstrations import Clumsiness, demonstrate, repeated_names

Encode = Callable[[str], list[int]]
Part = tuple[str, bool]
"""A text and whether the policy would have written it."""


@dataclass(frozen=True)
class Curriculum:
    """Shares of the schedule. drill: until then every second row only repeats names. one_result, two_results: until then searches
    bring so many passages, afterwards three. all_tokens: until then the loss is on observations too. clumsy: from there on."""

    drill: float = 1 / 3
    one_result: float = 0.35
    two_results: float = 0.5
    all_tokens: float = 0.6
    clumsy: float = 0.92
    clumsiness: Clumsiness = Clumsiness(guess=0.25, vague=0.15, give_up=0.55)

    def row(self, generator: random.Random, done: float) -> list[Part]:
        """The parts of one training row when the share `done` of the schedule is over."""
        if done < self.drill and generator.random() < 0.5:
            once, again = repeated_names(generator)
            return [(once, False), (again, True)]
        top_k = 1 if done < self.one_result else 2 if done < self.two_results else 3
        demonstration = demonstrate(generator, Clumsiness() if done < self.clumsy else self.clumsiness, top_k)
        everything = done < self.all_tokens
        parts = [(demonstration.prompt, everything)]
        for response, observation in demonstration.turns:
            parts += [(response, True), (observation, everything)]
        return parts


def to_trajectory(parts: Sequence[Part], encode: Encode) -> Trajectory:
    """The parts as a trajectory without log-probs: tokenized part by part, as a rollout is."""
    pieces = [(encode(text), trained) for text, trained in parts]
    tokens = torch.tensor([token for ids, _ in pieces for token in ids])
    mask = torch.tensor([trained for ids, trained in pieces for _ in ids])
    segment = Segment(tokens, mask, None, torch.where(mask, 0, -1))
    return Trajectory("warm-up", "warm-up", [segment], [], 0.0, StopReason.TERMINATED)
