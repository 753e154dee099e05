"""The supervised warm-up of the starting policy: which training rows to draw at which point of the schedule.

Copying names that were never seen before is the skill that all else rests on, and the last one that a tiny model learns. So it
is drilled first, then used on short traces, then on full ones; only towards the end the traces turn clumsy, which spoils the
behaviour and not the skill.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.types import Batch, Segment, StopReason, Trajectory
from rlflow_environments.search.world.demonstrations import Clumsiness, demonstrate, repeated_names

Encode = Callable[[str], list[int]]
Part = tuple[str, bool]
"""A text and whether the policy would have written it."""

CLUMSY = Clumsiness(guess=0.3, vague=0.2, give_up=0.65)
OBSERVATION_WEIGHT = 0.5


@dataclass(frozen=True)
class Curriculum:
    """Shares of the schedule. drill: until then every second row only repeats names. one_result: until then a search brings one
    passage, afterwards mostly three. clumsy: from there on the traces go wrong as often as `clumsiness` says."""

    drill: float = 0.08
    one_result: float = 0.15
    clumsy: float = 0.8
    clumsiness: Clumsiness = CLUMSY

    def row(self, generator: random.Random, done: float) -> list[Part]:
        """The parts of one training row when the share `done` of the schedule is over."""
        if done < self.drill and generator.random() < 0.5:
            once, again = repeated_names(generator)
            return [(once, False), (again, True)]
        top_k = 1 if done < self.one_result else generator.choice([1, 2, 3, 3, 3, 3])
        demonstration = demonstrate(generator, Clumsiness() if done < self.clumsy else self.clumsiness, top_k)
        parts = [(demonstration.prompt, False)]
        for response, observation in demonstration.turns:
            parts += [(response, True), (observation, False)]
        return parts


def to_trajectory(parts: Sequence[Part], encode: Encode) -> Trajectory:
    """The parts as a trajectory without log-probs, tokenized part by part, as a rollout is.

    Beside the policy's own text it trains what the row has said before (the second token of a repeated pair), which is what
    can be predicted of prose about unknown names; such tokens have version -1.
    """
    pieces = [(encode(text), sampled) for text, sampled in parts]
    tokens = [token for ids, _ in pieces for token in ids]
    sampled = torch.tensor([flag for ids, flag in pieces for _ in ids])
    pairs, seen = set(), [False]
    for pair in itertools.pairwise(tokens):
        seen.append(pair in pairs)
        pairs.add(pair)
    segment = Segment(torch.tensor(tokens), sampled | torch.tensor(seen), None, torch.where(sampled, 0, -1))
    return Trajectory("warm-up", "warm-up", [segment], [], 0.0, StopReason.TERMINATED)


def row_weights(batch: Batch) -> Tensor:
    """(B, T) token weights that sum to 1, those outside the policy's own text counting half."""
    shares = batch.loss_mask * torch.where(batch.require("versions", "warm-up") < 0, OBSERVATION_WEIGHT, 1.0)
    return shares / shares.sum()
