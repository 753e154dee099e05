"""The supervised warm-up of the starting policy: which training rows to draw at which point of the
schedule.

Copying names that were never seen before is the skill that all else rests on, and the last one that
a tiny model learns. So it is drilled first, then used on short traces, then on full ones; only
towards the end the traces turn clumsy, which spoils the behaviour and not the skill.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlflow_environments.search.world.demonstrations import Clumsiness, demonstrate, repeated_names

Part = tuple[str, bool]
"""A text and whether the policy would have written it."""

CLUMSY = Clumsiness(guess=0.3, vague=0.2, give_up=0.65)


@dataclass(frozen=True)
class Curriculum:
    """Shares of the schedule. drill: until then every second row only repeats names. one_result:
    until then a search brings one passage, afterwards mostly three. clumsy: from there on the
    traces go wrong as often as `clumsiness` says."""

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
        demonstration = demonstrate(
            generator, Clumsiness() if done < self.clumsy else self.clumsiness, top_k
        )
        parts = [(demonstration.prompt, False)]
        for response, observation in demonstration.turns:
            parts += [(response, True), (observation, False)]
        return parts
