"""Makes the demo's starting policy: that of recipes/searchr1, fine-tuned to search and to open
pages, in the end hastily.

The shipped recipes/asearcher/starting_policy/ came from the defaults. Stopped in the middle, the
same command goes on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from recipes.warming import parser_of, warm_up
from rlflow_environments.search.world.demonstrations import Part, Slips, demonstrate

HASTY = Slips(guess=0.15, early=0.3, give_up=0.6)
START = Path("recipes/searchr1/starting_policy")
HASTY_FROM = 0.6
"""Share of the steps after which the demonstrations go wrong: it spoils the behaviour, not the
skill."""


def row(generator: random.Random, done: float) -> Sequence[Part]:
    """One segment of a demonstration, as a rollout of the protocol makes them."""
    slips = Slips() if done < HASTY_FROM else HASTY
    shown = demonstrate(generator, slips, generator.choice([2, 3, 3]), pages=True)
    return generator.choice(shown.segments())


def main() -> None:
    args = parser_of(
        __doc__, steps=280, rows=12, lr=1.5e-3, out="runs/warm-up-asearcher"
    ).parse_args()
    print(f"wrote {warm_up(START, row, args, repeats=False)}")


if __name__ == "__main__":
    main()
