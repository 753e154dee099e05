"""What a world refuses: unknown options, and more questions than it has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.world.articles import make_half
from rlflow_environments.search.world.world import questions


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment.world: unknown keyword 'sed'. Did you mean 'seed'"
    ):
        SearchEnvironment(world={"directory": str(tmp_path), "sed": 3})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["one_hop", "two_hop", "comparison"])
def test_more_questions_than_a_world_has_are_an_error_and_no_endless_search(kind: str) -> None:
    counts = {"country": 1, "river": 2, "city": 2, "person": 4, "work": 1, "company": 1}
    half = make_half(random.Random(0), "train", counts)
    assert len(questions(half, random.Random(0), 2, {kind: 1.0})) == 2
    with pytest.raises(
        ConfigError, match=f"11 entities do not give 500 different {kind} questions"
    ):
        questions(half, random.Random(0), 500, {kind: 1.0})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("options", [{"size": 1.25}, {"size": 30.0}, {"val_share": 0.5}], ids=str)
def test_a_world_larger_than_its_words_is_refused(
    tmp_path: Path, options: dict[str, float]
) -> None:
    with pytest.raises(
        ConfigError, match=r"environment\.world: found size .* works last for (1\.23|0\.86) where"
    ):
        SearchEnvironment(world={"directory": str(tmp_path), **options})
    assert not [*tmp_path.iterdir()]
