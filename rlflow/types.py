"""The values that flow through a training step. B rows, T tokens, G attempts at one task; log-probs in nats.

    Task -> Episode -> Trajectory -> Group -> Batch -> loss -> optimizer -> (name, tensor) stream -> Engine
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import Tensor

Message = dict[str, str]
"""A chat message: {"role": ..., "content": ...}."""
Observation = Union[str, list[Message]]


class StopReason(str, enum.Enum):
    """Why an episode ended. TERMINATED is the environment's verdict, the truncations are Rollout's."""

    TERMINATED = "terminated"
    MAX_TURNS = "max_turns"  # truncated: the turn limit
    MAX_TOKENS = "max_tokens"  # truncated: the token budget of the episode or of a turn
    ABORTED = "aborted"  # infrastructure failed; out of loss and group baseline

    @property
    def truncated(self) -> bool:
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


@dataclass(frozen=True)
class Task:
    """One problem. `prompt`: text used verbatim, or messages that go through the chat template. `answer`: for the
    environment's scorer only; never shown to the policy. `metadata`: facts for metrics (hops, source, ...)."""

    id: str
    prompt: Observation
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """The state of one attempt. Rollout owns it and hands it to every `Environment.step`; `scratch` is the environment's."""

    task: Task
    turns: int = 0  # responses that the environment has been given so far, the current one included
    turns_left: int | None = None  # responses that may follow it; at 0 nobody reads an observation; None: not known
    cut: bool = False  # a token limit ended the current response
    scratch: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """What an environment answers to one model turn.

    observation: text appended verbatim, or messages for the chat template. reward: added to the episode's return.
    metrics: numbers about the episode; a later step's value replaces an earlier one's. stop: stop strings of the next
    turn (None keeps the environment's default). replace: an earlier observation to rewrite (starts a new segment).
    """

    observation: Observation = ""
    reward: float = 0.0
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    replace: dict[int, str] | None = None
    stop: tuple[str, ...] | None = None


@dataclass
class Segment:
    """One training sequence, (T,) each. Tokens exactly as fed and sampled. `loss_mask` is True only where the policy
    sampled; `logprobs` are the behaviour policy's (0 where not sampled; None where unknown); `versions` the weight
    version that sampled the token, -1 elsewhere. Position t describes token t."""

    tokens: Tensor  # int64
    loss_mask: Tensor  # bool
    logprobs: Tensor | None  # float32, nats
    versions: Tensor  # int64

    def __len__(self) -> int:
        return int(self.tokens.numel())


@dataclass
class Turn:
    """Where one response lies in its segment: tokens[start:stop]; `prefix_length` = start."""

    segment: int
    start: int
    stop: int
    reward: float
    duration_s: float
    response: str = ""
    observation: str = ""


@dataclass
class Trajectory:
    """One finished attempt. `reward` is the sum of its step rewards. `group_stats` = (size, mean, std with Bessel's
    correction) of the usable attempts of its group, stamped while the group was whole."""

    task_id: str
    group_id: str
    segments: list[Segment]
    turns: list[Turn]
    reward: float
    stop: StopReason
    metrics: dict[str, float] = field(default_factory=dict)
    source: str = "local"
    temperature: float = 1.0
    group_stats: tuple[int, float, float] | None = None
    prompt: str = ""
    error: str = ""  # of an aborted attempt

    @property
    def usable(self) -> bool:
        return self.stop is not StopReason.ABORTED


@dataclass
class Group:
    """The attempts at one task. Aborted ones stay in the list (they are counted) but are not `usable`."""

    id: str
    task: Task
    trajectories: list[Trajectory]

    @property
    def usable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.usable]


@dataclass
class Batch:
    """Rows are segments, right-padded. (B, T): tokens int64, loss_mask bool, logprobs / advantages / weights float32.
    (B,): lengths int64 (tokens without padding), temperatures float32. `weights` is each token's share in the loss: it
    sums to 1 over one optimizer step, all ranks together, and is 0 off the loss mask. `columns` holds further (B, T) or
    (B,) tensors by name, e.g. reference_logprobs, proximal_logprobs, rewards, group_mean, group_std, group_size."""

    tokens: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    lengths: Tensor
    temperatures: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def trained(self) -> Tensor:
        """(B, T) bool: the tokens that an update computes log-probs for, sampled by the policy or with a weight."""
        return self.loss_mask | (self.weights != 0)

    def select(self, rows: Tensor | list[int]) -> Batch:
        """The given rows, in that order, padding columns cut to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        width = int(self.lengths[index].max()) if len(index) else 0

        def pick(value: Tensor) -> Tensor:
            return value[index, :width] if value.dim() == 2 else value[index]

        picked = {f.name: pick(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "columns"}
        return Batch(**picked, columns={name: pick(value) for name, value in self.columns.items()})

    def replace(self, **changes: Any) -> Batch:
        """A copy with fields exchanged; `columns` are merged into the present ones."""
        columns = {**self.columns, **changes.pop("columns", {})}
        return dataclasses.replace(self, columns=columns, **changes)


@dataclass
class PolicyOutput:
    """What the trainer computed with gradients for a batch, (B, T): position t describes token t; position 0, padding and
    what is not `Batch.trained` are 0. `entropy` is of the distribution that token t was drawn from (nats, at the row's
    temperature)."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
