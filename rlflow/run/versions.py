"""Weight versions of a trajectory's tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlflow.types import Segment, Trajectory


def trained_versions(trajectory: Trajectory) -> tuple[int, int] | None:
    """(least, greatest) weight version of the tokens that the policy sampled; None where there is none."""
    found = [segment.versions[segment.loss_mask] for segment in trajectory.segments]
    versions = torch.cat(found) if found else torch.empty(0)
    return (int(versions.min()), int(versions.max())) if versions.numel() else None


def mirrored(trajectory: Trajectory, checkpoint: int) -> Trajectory:
    """The trajectory with versions in terms of the policy that goes on from a checkpoint, for tokens of later versions, which
    were lost with the run that made them: version c + d is d updates away from the checkpoint's, as c - d is.

    So the staleness of such a token, V - (c - d), is again the number of updates between the policy in training and the one
    that sampled it. A version below 0 means that the token is older than the run."""

    def changed(segment: Segment) -> Segment:
        versions = torch.where(segment.versions > checkpoint, 2 * checkpoint - segment.versions, segment.versions)
        return replace(segment, versions=versions)

    return replace(trajectory, segments=[changed(segment) for segment in trajectory.segments])
