"""The seeds by which a step's trajectories are dealt to minibatches."""

from __future__ import annotations

from itertools import product

from rlflow.loop import shuffle_seed


def test_every_seed_step_and_epoch_shuffles_differently() -> None:
    seeds = (-2, -1, 0, 1, 2**61 - 1)  # hash() takes the first two for equal, and 0 and the last
    places = list(product(seeds, (0, 1, 10), (0, 1)))
    assert len({shuffle_seed(*place) for place in places}) == len(places)


def test_the_seed_is_the_same_in_every_process_and_fits_a_generator() -> None:
    assert shuffle_seed(0, 0, 0) == 582633294605384991 < 2**63
