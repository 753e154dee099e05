"""ASearcher once more: against what a guess is worth, with a control that saw few hops and had all turns."""

from __future__ import annotations

from dataclasses import replace

from experiments import asearcher
from experiments.asearcher import FAR, LEARNED
from experiments.base import Results, Verdict, all_of, average, beats, values
from experiments.tasks.chains import ENTITIES

GUESSED = 1 / (len(ENTITIES) - FAR)  # after three look-ups: one of those that were not seen
MARGIN = 0.1
CONTROL = "12 turns, at most 3 hops"


def judge(results: Results) -> Verdict:
    few, learned = values(results, "4 turns", "far"), values(results, "12 turns", "learned")
    control = average(results, CONTROL, "far")
    return all_of(
        (
            min(learned) >= LEARNED,
            f"12 turns: at least {min(learned):.2g} of the training questions at the end",
        ),
        (
            max(few) <= GUESSED + MARGIN,
            f"4 turns: at most {max(few):.2g} beyond {FAR} hops, a guess {GUESSED:.3f}",
        ),
        beats(results, "12 turns", "4 turns", "far", by=0.2),
        (True, f"the control has {control:.2g} there"),
    )


EXPERIMENT = replace(
    asearcher.EXPERIMENT,
    name="asearcher_guesses",
    setup="As above, and a control that is trained with 12 turns on questions of at most 3 hops: if it answers long questions, "
    "it is the turns that the policy of 4 lacks, and not the questions.",
    rule=(
        f"In every seed the policy of 12 turns comes to {LEARNED:.0%} of its questions in training, that of 4 turns is right in "
        f"at most {GUESSED:.3f} (a guess) + {MARGIN} of the questions of more than {FAR} hops, and that of 12 turns is better "
        "there, by 20 points in the mean."
    ),
    arms=(*asearcher.ARMS, CONTROL),
    judge=judge,
    version=1,
)
