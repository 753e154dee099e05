"""The values that flow through a training step. B rows, T tokens, G attempts at one task; log-probs in nats.

    Task -> Episode -> Trajectory -> Group -> Batch -> loss -> optimizer -> (name, tensor) stream -> Engine
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError

Message = dict[str, str]
"""A chat message: {"role": ..., "content": ...}."""
Observation = Union[str, list[Message]]


class StopReason(str, enum.Enum):
    """Why an episode ended: TERMINATED by the environment's verdict, else Rollout's, also of a cut last response."""

    TERMINATED = "terminated"
    MAX_TURNS = "max_turns"  # truncated: the turn limit
    MAX_TOKENS = "max_tokens"  # truncated: the token budget of the episode or of a turn
    ABORTED = "aborted"  # infrastructure failed; out of loss and group baseline


@dataclass(frozen=True)
class Task:
    """One problem. `prompt`: text used verbatim, or messages that go through the chat template. `answer`: for the
    environment's scorer only; never shown to the policy. `metadata`: facts for metrics (hops, source, ...). `most_attempts`,
    `most_turns`: where this task is to get fewer than the run gives."""

    id: str
    prompt: Observation
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    most_attempts: int | None = None
    most_turns: int | None = None

    def attempts(self, samples: int) -> int:
        """How many of the `samples` that a run gives each task this one gets."""
        return min(samples, self.most_attempts or samples)


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

    observation: text appended verbatim, or messages for the chat template. reward: added to the episode's return. rewards: by
    name, each added to the episode's return of that name, for methods that weigh several; `reward` is what all others see.
    metrics: numbers about the episode; a later step's value replaces an earlier one's. stop: stop strings of the next
    turn (None keeps the environment's default). replace: an earlier observation to rewrite (starts a new segment).
    """

    observation: Observation = ""
    reward: float = 0.0
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    replace: dict[int, str] | None = None
    stop: tuple[str, ...] | None = None
    rewards: dict[str, float] = field(default_factory=dict)


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

    def __repr__(self) -> str:
        return f"Segment({len(self)} tokens, {int(self.loss_mask.sum())} sampled)"


@dataclass
class Turn:
    """Where one response lies in its segment: tokens[start:stop]; `prefix_length` = start."""

    segment: int
    start: int
    stop: int
    reward: float
    duration_s: float  # of the response and the environment's answer
    response: str = ""
    observation: str = ""


@dataclass
class Trajectory:
    """One finished attempt. `reward` is the sum of its step rewards. `group_stats` = (size, mean, std with Bessel's
    correction) of the usable attempts of its group, stamped while the group was whole. `rewards` and `rewards_stats`: the sums of
    the named rewards, and (mean, std) of each in the group, 0 standing for an attempt that never got it."""

    task_id: str
    group_id: str
    segments: list[Segment]
    turns: list[Turn]
    reward: float
    stop: StopReason
    metrics: dict[str, float] = field(default_factory=dict)
    source: str = "local"  # one of SOURCES
    attempt: int = 0  # which of its group's attempts this is
    temperature: float = 1.0
    group_stats: tuple[int, float, float] | None = None
    prompt: str = ""
    error: str = ""  # of an aborted attempt
    id: str = ""  # no other trajectory of the run has it; the same where a resumed run samples the same attempt again
    rewards: dict[str, float] = field(default_factory=dict)
    rewards_stats: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{len(self.turns)} turns, {sum(map(len, self.segments))} tokens, reward {self.reward:g}"
        return f"Trajectory({str(self.task_id)[:60]!r}, {size}, {self.stop.value})"

    @property
    def usable(self) -> bool:
        return self.stop is not StopReason.ABORTED


@dataclass
class Group:
    """The attempts at one task. Aborted ones stay in the list (they are counted) but are not `usable`."""

    id: str
    task: Task
    trajectories: list[Trajectory]

    def __repr__(self) -> str:
        attempts = f"{len(self.trajectories)} attempts, {len(self.usable)} usable"
        return f"Group({str(self.task.id)[:60]!r}, {attempts})"

    @property
    def usable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.usable]


def stamp(trajectories: Sequence[Trajectory]) -> None:
    """Writes (size, mean, std with Bessel's correction) of the usable attempts' rewards on each of them, named ones too: while
    their group is whole, and again where an attempt of another source has come in."""
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    if not usable:
        return
    stats = (len(usable), *_mean_and_std([trajectory.reward for trajectory in usable]))
    names = sorted({name for trajectory in usable for name in trajectory.rewards})
    by_name = {name: _mean_and_std([trajectory.rewards.get(name, 0.0) for trajectory in usable]) for name in names}
    for trajectory in usable:
        trajectory.group_stats, trajectory.rewards_stats = stats, dict(by_name)


def _mean_and_std(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
"""Of a batch's extras, (B, T, k): the k tokens that the teacher thinks likeliest in the place of token t, and their log-probs,
where a part needs `top_logprobs`."""


SOURCES = ("local", "external", "replay", "demonstration")
"""Where a trajectory may come from: this run's own rollout, a peer's, an earlier step's, or a teacher's hand."""

NAMED_REWARD, NAMED_MEAN, NAMED_STD = "reward/", "reward_mean/", "reward_std/"
"""Before a name in `Batch.extras`: (B,) float64, the return of the row's trajectory under it, and its group's statistics."""


@dataclass
class Batch:
    """What an update is made from. Rows are segments, right-padded to T tokens; position t describes token t.

    The first seven fields every batch has; the others are there where `make_batch` or the training step filled them, and
    `require` reads them. `weights` and `coefficients` both multiply a loss, token by token, but not the same one:
    `weights` are each token's share in the mean, for every term; `coefficients` are importance corrections and keep-masks,
    for policy-gradient kernels alone, so that KL, entropy and likelihood terms keep their own size.
    """

    tokens: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool: sampled by the policy that is trained
    logprobs: Tensor  # (B, T) nats, of the behaviour policy that sampled the token; 0 where not sampled or not known
    advantages: Tensor  # (B, T)
    weights: Tensor  # (B, T): sums to 1 over one optimizer step, all ranks together; 0 off the loss mask
    lengths: Tensor  # (B,) int64, tokens without padding
    temperatures: Tensor  # (B,) at which the row was sampled

    # From the trajectories, by `make_batch`.
    logprobs_known: Tensor | None = None  # (B,) bool: `logprobs` are those of the policy that sampled the row
    versions: Tensor | None = None  # (B, T) int64: weight version that sampled the token, -1 elsewhere
    rewards: Tensor | None = None  # (B,) float64: return of the row's trajectory
    group: Tensor | None = None  # (B,) int64: rows of one group have one number, from 0 in order of appearance
    group_size: Tensor | None = None  # (B,) int64: usable attempts while the group was whole; 0: never stamped
    group_mean: Tensor | None = None  # (B,) float64, of the group's returns
    group_std: Tensor | None = None  # (B,) float64, of the group's returns, with Bessel's correction
    trajectory: Tensor | None = None  # (B,) int64: index of the row's trajectory
    attempt: Tensor | None = None  # (B,) int64: which attempt of its group the trajectory is
    segment: Tensor | None = None  # (B,) int64: which segment of its trajectory the row is
    turn: Tensor | None = None  # (B, T) int64: the trajectory's turn that sampled the token, from 0; -1 elsewhere
    turn_rewards: Tensor | None = None  # (B, T) float64: reward of the token's turn, on each of its tokens; 0 elsewhere
    token_rewards: Tensor | None = None  # (B, T) float64: what each token earned, once reward terms were added
    turn_durations_s: Tensor | None = None  # (B, T) seconds that the token's turn took, generation and environment
    stop: Tensor | None = None  # (B,) int64: place of the trajectory's StopReason in `tuple(StopReason)`
    source: Tensor | None = None  # (B,) int64: place of the trajectory's source in SOURCES

    # From the trainer, where a component's `needs` says so. Nats.
    proximal_logprobs: Tensor | None = None  # (B, T) of the policy before the step's first update, by the trainer
    reference_logprobs: Tensor | None = None  # (B, T) of the frozen reference
    teacher_logprobs: Tensor | None = None  # (B, T) of the teacher, at the row's temperature
    current_logprobs: Tensor | None = None  # (B, T) of the policy just before this minibatch's update
    current_entropy: Tensor | None = None  # (B, T) of the distribution sampled from, just before this minibatch's update
    trainer_version: Tensor | None = None  # (B,) int64: weight version of the policy before the step's first update

    # From the trainer's critic, likewise; rewards.
    values: Tensor | None = None  # (B, T) of the state before each trained token, by the critic before the step's first update
    final_values: Tensor | None = None  # (B,) of the state after the row's last token, by the same critic

    # From advantages that are made with a critic.
    returns: Tensor | None = None  # (B, T) what `values` should have been: the target of the value loss

    # From transforms.
    coefficients: Tensor | None = None  # (B, T) factors on policy-gradient kernels, without gradient; None: all 1
    ratio_low: Tensor | None = None  # (B, T) where clipping of the importance ratio begins; None: where the kernel says
    ratio_high: Tensor | None = None  # (B, T)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """(B, T) by name: what transforms report, each as its mean under the weights."""

    extras: dict[str, Tensor] = field(default_factory=dict)
    """(B,), (B, T) or (B, T, k) tensors of a method's own, by name, before they are worth a field."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def __repr__(self) -> str:
        sampled = f"{int(self.loss_mask.sum())} sampled, {self.tokens.device}"
        return f"Batch({len(self)} rows of {self.tokens.shape[1]} tokens, {sampled})"

    @property
    def trained(self) -> Tensor:
        """(B, T) bool: the tokens that an update computes log-probs for, sampled by the policy or with a weight."""
        return self.loss_mask | (self.weights != 0)

    def require(self, name: str, who: str) -> Tensor:
        """The optional field of that name. Raises RLFlowError where `who` reads it and nothing has filled it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise RLFlowError(
                f"{who}: the batch has no {name}, expected it {_FILLED.get(name, 'from make_batch')}. A component whose "
                f"`needs` name it gets it from the training step."
            )
        return value

    def select(self, rows: Tensor | list[int]) -> Batch:
        """The given rows, in that order, padding cut to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        width = int(self.lengths[index].max()) if len(index) else 0
        return self.map(lambda value: value[index, :width] if value.dim() >= 2 else value[index])

    def to(self, device: torch.device | str) -> Batch:
        """The batch with every tensor on the device."""
        return self.map(lambda value: value.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor that it has, `metrics` and `extras` included, put through `change`."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return None if value is None else change(value)

        return dataclasses.replace(self, **{item.name: changed(getattr(self, item.name)) for item in dataclasses.fields(self)})

    def replace(self, **changes: Any) -> Batch:
        """A copy with fields exchanged; `metrics` and `extras` are merged into the present ones."""
        merged: dict[str, Any] = {name: {**getattr(self, name), **changes.pop(name, {})} for name in ("metrics", "extras")}
        return dataclasses.replace(self, **merged, **changes)


_FILLED = {
    "proximal_logprobs": "from trainer.score(batch)['logprobs'] before the first update",
    "reference_logprobs": "from trainer.score(batch, model='reference')['logprobs'], after trainer.snapshot('reference')",
    "teacher_logprobs": "from algorithm.teacher",
    "current_logprobs": "from trainer.score(minibatch)['logprobs'] before its update",
    "current_entropy": "from trainer.score(minibatch, want=('entropy',))['entropy'] before its update",
    "trainer_version": "from the training step",
    "values": "from trainer.score(batch, want=('values',))['values'] before the first update",
    "final_values": "from the critic, with `values`",
    "returns": "from an advantage that is made with a critic, such as gae",
}


@dataclass
class PolicyOutput:
    """What the trainer computed with gradients for a batch, (B, T): position t describes token t; position 0, padding and
    what is not `Batch.trained` are 0. `entropy` is of the distribution that token t was drawn from (nats, at the row's
    temperature). `top_logprobs` (B, T, k) are those of the ids in the teacher's place, TEACHER_TOP_IDS of the batch's extras.
    Beyond `logprobs` there is what the loss `needs`. A critic gives `values`, of the state before token t, and no distribution:
    its `logprobs` are NaN."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_logprobs: Tensor | None = None


LossResult = tuple[Tensor, dict[str, Tensor]]
Reduction = Literal["mean", "max", "sum"]


class Loss(ABC):
    """(PolicyOutput, Batch) -> per-token loss (B, T) to minimize, and detached metrics (B, T) by name.

    A loss never sums or normalizes: `Batch.weights` does. A metric is reported as its mean under the weights,
    sum(weights * metric) / sum(weights), or as `reductions` says.
    """

    needs: frozenset[str] = frozenset()
    """What must be there beyond log-probs: `entropy`, `values` and `top_logprobs` of PolicyOutput; `proximal`, `reference` and
    `teacher` log-probs of the batch. The training step and the trainer fill exactly the union over all components."""

    vanishes_at_zero_advantage: bool = False
    """The loss and its gradient are 0 wherever the advantage is: rows without any advantage are left out of updates."""

    reductions: Mapping[str, Reduction] = {}
    """How metrics become one number, where that is not `mean`: `max` and `sum` over trained tokens."""

    refreshes: Mapping[str, int] = {}
    """Snapshots that a run takes anew of the policy, and after how many steps each: {"reference": 100}. The others are frozen."""

    @property
    def terms(self) -> tuple[Loss, ...]:
        """The losses that it is the sum of; itself alone where it is none."""
        return (self,)

    @abstractmethod
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult: ...

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Told, on the controller, of the metrics of each update: where a loss with a memory changes it."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON-able values; {} where nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""

    def split(self) -> tuple[Loss | None, Loss | None]:
        """(the terms in the policy's outputs, the terms in the critic's values): two models, so two losses. A loss that is no
        sum is one or the other."""
        return (None, self) if "values" in self.needs else (self, None)


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A plain function as a loss that needs log-probs only."""

    function: Callable[[PolicyOutput, Batch], LossResult]

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return self.function(output, batch)


def as_loss(loss: Loss | Callable[[PolicyOutput, Batch], LossResult]) -> Loss:
    """The loss itself; a plain function wrapped. Raises ConfigError for `needs` that are no set of names."""
    made = loss if isinstance(loss, Loss) else FunctionLoss(loss)
    check_needs(made)
    return made


def check_needs(part: Any) -> None:
    """Raises ConfigError where `needs` is no set: of a text each letter would be a name."""
    if not isinstance(part.needs, (set, frozenset)):
        names = part.needs if isinstance(part.needs, (tuple, list)) else [part.needs]
        raise ConfigError(
            f"{type(part).__name__}.needs: expected a set of names, found {part.needs!r}; write needs = frozenset({{"
            f"{', '.join(map(repr, names))}}})."
        )
