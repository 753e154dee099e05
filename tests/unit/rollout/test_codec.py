"""Trajectories and groups go through bytes and come back bit for bit; other bytes are told."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from rlflow.errors import CheckpointError
from rlflow.rollout import codec
from rlflow.rollout.codec import from_bytes, groups_from_bytes, groups_to_bytes, to_bytes
from rlflow.run.checkpoints import RunState, read_state
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn


def segment(versions: list[int], known: bool = True) -> Segment:
    found = torch.tensor(versions, dtype=torch.int64)
    logprobs = torch.rand(len(versions)).neg().masked_fill(found < 0, 0.0) if known else None
    return Segment(torch.arange(len(versions)) + 3, found >= 0, logprobs, found)


def trajectory(*segments: Segment) -> Trajectory:
    """One that has something in every field."""
    turn = Turn(0, 1, 3, 0.5, 1.25, "half an emoji \ud83d", "ü\u2028")
    return Trajectory(
        "t/1", "0:t/1", list(segments), [turn], 0.1 + 0.2, StopReason.MAX_TURNS,
        {"em": math.inf, "n": 2.0}, "replay", 3, 0.7, (2, 0.1, 1 / 3), "Why?", "lost", "0:t/1/3",
        {"f1": 1 / 3}, {"f1": (0.25, 0.5)},
    )  # fmt: skip


def several() -> list[Trajectory]:
    """With segments with routes, whose log-probs nobody knows, without a token, and none at all."""
    first = trajectory(segment([-1, 4, 5]), segment([-1, -1], known=False), segment([]))
    first.segments[0].routes = torch.randint(0, 256, (2, 3, 4), dtype=torch.uint8)
    first.segments[0].routes_version = 4
    return [first, trajectory(), trajectory(segment([7]))]


def check_equal(found: Trajectory, expected: Trajectory) -> None:
    for ours, theirs in zip(found.segments, expected.segments, strict=True):
        for name, one in vars(ours).items():
            other = getattr(theirs, name)
            assert (one is None) == (other is None)
            if not isinstance(one, torch.Tensor):
                assert one == other
            else:
                assert one.dtype == other.dtype and torch.equal(one, other)
    bare = dataclasses.replace(expected, segments=[])
    assert dataclasses.replace(found, segments=[]) == bare
    assert isinstance(found.stop, StopReason)


def test_every_field_of_a_trajectory_comes_back_bit_for_bit() -> None:
    before = several()
    for found, expected in zip(from_bytes(to_bytes(before)), before, strict=True):
        check_equal(found, expected)
    assert from_bytes(to_bytes([])) == []


def test_log_probs_keep_their_bits() -> None:
    """Also those of NaN with a payload, of infinities, of negative zero and of subnormal numbers."""
    bits = torch.tensor([0x7FC00001, -0x800000, -0x80000000, 1, 0x3DCCCCCD], dtype=torch.int32)
    sampled = torch.ones(5, dtype=torch.bool)
    one = Segment(torch.arange(5), sampled, bits.view(torch.float32), torch.full((5,), 2**31 - 1))
    ((found,),) = (each.segments for each in from_bytes(to_bytes([trajectory(one)])))
    assert found.logprobs is not None and torch.equal(found.logprobs.view(torch.int32), bits)
    assert torch.equal(found.versions, one.versions)


def test_groups_come_back_with_their_tasks_through_a_checkpoint(tmp_path: Path) -> None:
    """In JSON alone numbers that are not finite, tuples, sets and keys of numbers would change."""
    said = {"x": (1,), 2: [None, True], "in": {"a", "b"}, "raw": b"\0\xff", "odd": -math.inf}
    groups = [
        Group("g", Task("t", "?", ("a", 1.5), {"hops": 2, "said": said}, 2, 3), several()),
        Group("h", Task("u", [{"role": "user", "content": "?"}], {"dict": [["tuple", 1]]}), []),
    ]
    RunState({"part": [{"groups": groups_to_bytes(groups), "none": b""}]}).write(tmp_path)
    (state,) = read_state(tmp_path)["part"]
    found = groups_from_bytes(state["groups"])
    assert [(one.id, one.task) for one in found] == [(one.id, one.task) for one in groups]
    assert [len(one.trajectories) for one in found] == [3, 0] and state["none"] == b""
    for one, other in zip(found[0].trajectories, groups[0].trajectories, strict=True):
        check_equal(one, other)


def test_an_object_of_a_task_that_python_cannot_spell_is_its_text() -> None:
    task = Task("t", "?", Path("a/b"), {"odd": [Path("c")], "hops": 2})
    ((found,)) = groups_from_bytes(groups_to_bytes([Group("g", task, [])]))
    assert found.task == Task("t", "?", "a/b", {"odd": ["c"], "hops": 2})


def test_a_changed_byte_or_a_missing_end_is_told_with_the_place() -> None:
    payload, draw = to_bytes(several()), random.Random(0)
    for place in [0, len(payload) - 1, *draw.sample(range(len(payload)), 100)]:
        changed = bytearray(payload)
        changed[place] ^= 1 << draw.randrange(8)
        for damaged in (bytes(changed), payload[:place]):
            with pytest.raises(CheckpointError, match=r"^here: expected trajectories .* checksum"):
                from_bytes(damaged, "here")


def altered(**changes: Any) -> bytes:
    """With another value among what is JSON, and the checksum of that."""
    arrays = load(to_bytes(several())[: -codec.CHECKSUM_BYTES])
    about = codec._untagged(json.loads(arrays["about"].tobytes())) | changes
    text = json.dumps(codec._tagged(about)).encode()
    body = save({**arrays, "about": np.frombuffer(text, np.uint8)})
    return body + codec._checksum(body)


@pytest.mark.parametrize(
    "payload, told",
    [
        (altered(lengths={"tokens": [1]}), "tokens: expected 1 values, found 6"),
        (altered(lengths={"tokens": [6, -6, 6]}), ""),
        (altered(lengths={}), ""),
        (altered(trajectories=[{"task_id": "t"}]), ""),
        (altered(trajectories=[{**codec._row(trajectory()), "later": 1}]), "'later'"),
        (b"no safetensors" + codec._checksum(b"no safetensors"), ""),
        (b"", "another checksum"),
    ],
)
def test_bytes_of_another_version_are_told_in_one_line(payload: bytes, told: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"here: expected.*another version: .*{told}"
    ) as raised:
        from_bytes(payload, "here")
    assert "\n" not in str(raised.value)
