"""Trajectories as bytes for machines, and as text for policies that have other tokens.

The bytes are a safetensors file of the segments' arrays, with everything else as JSON among them,
and a checksum behind it. Nothing in them is code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlflow.errors import CheckpointError
from rlflow.storage.columns import join, split
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn

FORMAT = 1
CHECKSUM_BYTES = 8
PER_TOKEN = {
    "tokens": (np.int32, np.int64),  # a vocabulary and a version each fit 31 bits
    "loss_mask": (np.bool_, np.bool_),
    "logprobs": (np.float32, np.float32),
    "versions": (np.int32, np.int64),
    "routes": (None, None),
}
"""The fields of a segment that have a row per token, or are None: types in bytes, in memory; None:
as it is."""
COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, dict, set, frozenset, bytes)}


def to_bytes(trajectories: Sequence[Trajectory], **about: Any) -> bytes:
    """The trajectories; `from_bytes` gives them back bit for bit. about: what else is to be
    kept."""
    segments = [segment for one in trajectories for segment in one.segments]
    arrays, lengths = join([_arrays(segment) for segment in segments])
    about |= {"trajectories": [_row(one) for one in trajectories], "lengths": lengths}
    text = np.frombuffer(json.dumps(_tagged(about)).encode(), np.uint8)
    body = save({**arrays, "about": text})
    return body + _checksum(body)


def from_bytes(payload: bytes, where: str = "trajectories") -> list[Trajectory]:
    """The trajectories of `to_bytes`. Raises CheckpointError, which names `where`."""
    return _read(payload, where)[0]


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """The groups with all of their tasks: a teacher's prompt may name an answer or metadata.

    An object in there that is no value of Python's own becomes its text, as a prompt shows it."""
    rows = [(group.id, vars(group.task), len(group.trajectories)) for group in groups]
    return to_bytes([one for group in groups for one in group.trajectories], groups=rows)


def groups_from_bytes(payload: bytes, where: str = "groups") -> list[Group]:
    """The groups of `groups_to_bytes`. Raises CheckpointError, which names `where`."""
    trajectories, about = _read(payload, where)
    attempts = iter(trajectories)
    return [
        Group(name, Task(**task), list(islice(attempts, count)))
        for name, task, count in about["groups"]
    ]


def _read(payload: bytes, where: str) -> tuple[list[Trajectory], dict[str, Any]]:
    body, checksum = payload[:-CHECKSUM_BYTES], payload[-CHECKSUM_BYTES:]
    try:
        if checksum != _checksum(body):
            raise ValueError("another checksum")
        arrays = load(body)
        about = _untagged(json.loads(arrays.pop("about").tobytes()))
        segments = iter(split(arrays, about["lengths"]))
        return [_trajectory(row, segments) for row in about["trajectories"]], about
    except (ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: expected trajectories as this version of rlflow writes them, found "
            f"{len(payload)} bytes that are damaged or of another version: {error}."
        ) from None


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body, seed=FORMAT)


def _arrays(segment: Segment) -> dict[str, np.ndarray]:
    return {
        name: value.numpy().astype(kind or value.numpy().dtype)
        for name, (kind, _) in PER_TOKEN.items()
        if (value := getattr(segment, name)) is not None
    }


def _row(trajectory: Trajectory) -> dict[str, Any]:
    segments = [
        {name: value for name, value in vars(segment).items() if name not in PER_TOKEN}
        for segment in trajectory.segments
    ]
    return {
        **vars(trajectory),
        "segments": segments,
        "turns": list(map(vars, trajectory.turns)),
    }


def _trajectory(row: dict[str, Any], arrays: Iterator[dict[str, np.ndarray]]) -> Trajectory:
    segments = [_segment(next(arrays), others) for others in row["segments"]]
    turns = [Turn(**turn) for turn in row["turns"]]
    stop = StopReason(row["stop"])
    return Trajectory(**{**row, "segments": segments, "turns": turns, "stop": stop})


def _segment(arrays: dict[str, np.ndarray], others: dict[str, Any]) -> Segment:
    values = {
        name: torch.from_numpy(arrays[name].astype(kind or arrays[name].dtype))
        if name in arrays
        else None
        for name, (_, kind) in PER_TOKEN.items()
    }
    return Segment(**values, **others)  # type: ignore[arg-type]


def _tagged(value: Any) -> Any:
    """The value in JSON, where a list is a collection's name and items."""
    if type(value) in COLLECTIONS.values():
        items = value.items() if isinstance(value, dict) else value
        return [type(value).__name__, [_tagged(item) for item in items]]
    said = value is None or isinstance(value, (bool, int, float, str))
    return value if said else str(value)


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, items = value
    return COLLECTIONS[name](map(_untagged, items))


End = Literal["eos", "stop", "length"]
"""How a response ended: with the end-of-sequence token, with a stop string, or at a token limit."""


@dataclass(frozen=True)
class Response:
    """One turn of the policy, as its environment heard it."""

    text: str
    end: End


@dataclass(frozen=True)
class Transcripts:
    """What was said in several attempts at one task."""

    task: Task
    attempts: tuple[tuple[Response, ...], ...]


def transcribe(group: Group, eos_ids: Collection[int]) -> Transcripts:
    """The transcript of the group's usable attempts. eos_ids: end-of-sequence tokens of the
    tokenizer that they were sampled with."""
    return Transcripts(group.task, tuple(_responses(one, eos_ids) for one in group.usable))


def _responses(trajectory: Trajectory, eos_ids: Collection[int]) -> tuple[Response, ...]:
    said = []
    for turn in trajectory.turns:
        last = int(trajectory.segments[turn.segment].tokens[turn.stop - 1])
        cut = trajectory.stop is StopReason.MAX_TOKENS and turn is trajectory.turns[-1]
        end: End = "eos" if last in eos_ids else "length" if cut else "stop"
        said.append(Response(turn.response, end))
    return tuple(said)
