"""One trajectory as bytes: safetensors with JSON beside them. Nothing in them is code."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import load, save

from rlflow.codec import remembered_trajectories, trajectories_state
from rlflow.types import Segment, Trajectory

_ROW = "trajectory"


def trajectory_bytes(trajectory: Trajectory) -> bytes:
    """The trajectory; `read_trajectory` gives it back bit for bit."""
    state = trajectories_state([trajectory])
    (row,) = state.pop("trajectories")
    text = torch.frombuffer(bytearray(json.dumps(row), "ascii"), dtype=torch.uint8)
    return save({**state, _ROW: text})


def read_trajectory(payload: bytes) -> Trajectory:
    """The trajectory of `trajectory_bytes`."""
    tensors = load(payload)
    row = json.loads(tensors.pop(_ROW).numpy().tobytes())
    return remembered_trajectories({**tensors, "trajectories": [row]})[0]


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
