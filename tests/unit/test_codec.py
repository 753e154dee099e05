"""A trajectory goes through bytes and comes back bit for bit; versions of lost weights are told as distances."""

from __future__ import annotations

import dataclasses
import math

import torch

from rlflow.run.versions import mirrored, read_trajectory, trained_versions, trajectory_bytes
from rlflow.types import Segment, StopReason, Trajectory, Turn


def segment(versions: list[int], known: bool = True) -> Segment:
    found = torch.tensor(versions, dtype=torch.int64)
    logprobs = torch.rand(len(versions)).neg().masked_fill(found < 0, 0.0) if known else None
    return Segment(torch.arange(len(versions)) + 3, found >= 0, logprobs, found)


def trajectory(*segments: Segment) -> Trajectory:
    turn = Turn(0, 1, 3, 0.5, 1.25, "half an emoji \ud83d", "ü\u2028")
    return Trajectory("t/1", "0:t/1", list(segments), [turn], 0.1 + 0.2, StopReason.MAX_TURNS, {"em": math.nan, "n": 2.0},
                      attempt=3, temperature=0.7, prompt="Why?", id="0:t/1/3", rewards={"f1": 1 / 3})  # fmt: skip


def test_bytes_give_back_every_field_bit_for_bit() -> None:
    before = trajectory(segment([-1, 4, 5]), segment([-1, -1], known=False), segment([]))
    after = read_trajectory(trajectory_bytes(before))
    for ours, theirs in zip(after.segments, before.segments, strict=True):
        for name in ("tokens", "loss_mask", "versions", "logprobs"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))
    assert math.isnan(after.metrics.pop("em")) and math.isnan(before.metrics.pop("em"))
    assert dataclasses.replace(after, segments=[]) == dataclasses.replace(before, segments=[])


def test_versions_are_those_of_trained_tokens() -> None:
    assert trained_versions(trajectory(segment([-1, 4, 5]), segment([-1, 3]))) == (3, 5)
    assert trained_versions(trajectory(segment([-1, -1]))) is None and trained_versions(trajectory()) is None


def test_a_version_after_the_checkpoint_counts_as_many_updates_before_it() -> None:
    after = mirrored(trajectory(segment([-1, 3, 4, 5, 6])), checkpoint=4)
    assert after.segments[0].versions.tolist() == [-1, 3, 4, 3, 2]
