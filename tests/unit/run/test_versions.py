"""Weight versions of tokens that were lost with the weights are told as distances."""

from __future__ import annotations

from rlflow.run.versions import mirrored, trained_versions
from tests.unit.test_codec import segment, trajectory


def test_versions_are_those_of_trained_tokens() -> None:
    assert trained_versions(trajectory(segment([-1, 4, 5]), segment([-1, 3]))) == (3, 5)
    assert trained_versions(trajectory(segment([-1, -1]))) is None
    assert trained_versions(trajectory()) is None


def test_a_version_after_the_checkpoint_counts_as_many_updates_before_it() -> None:
    after = mirrored(trajectory(segment([-1, 3, 4, 5, 6])), checkpoint=4)
    assert after.segments[0].versions.tolist() == [-1, 3, 4, 3, 2]
