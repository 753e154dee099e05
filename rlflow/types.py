"""The values that flow through a training step: B rows, T tokens; log-probs in nats.
Task -> Episode -> Trajectory -> Group -> Batch -> loss -> optimizer -> weights -> Engine"""

from __future__ import annotations

import enum
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union, get_args

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError

Message = dict[str, str]
"""A chat message: {"role": ..., "content": ...}."""
Observation = Union[str, list[Message]]


class StopReason(str, enum.Enum):
    """Why an episode ended: TERMINATED is the environment's verdict, the others are Rollout's."""

    TERMINATED = "terminated"
    MAX_TURNS = "max_turns"  # truncated: the turn limit
    MAX_TOKENS = "max_tokens"  # truncated: the token budget of the episode or of a turn
    ABORTED = "aborted"  # infrastructure failed; out of loss and group baseline


@dataclass(frozen=True)
class TaskRecording:
    """What is to be imitated, of a run with `rollout.engine: recorded`.

    messages: for the chat template, with `tool_calls` where there are some; of those from place
    `context` on every assistant's is trained, but the first of all. tools: JSON schemas that it presents. texts: in place
    of messages, one behind the other, each with whether it is trained."""

    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    context: int = 0
    texts: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True)
class Task:
    """One problem.

    prompt: text used verbatim, or messages for the chat template. answer: for the scorer alone.
    metadata: facts for metrics (hops, source). most_attempts, most_turns: fewer than the run's.
    recording: what is imitated, where nothing is sampled."""

    id: str
    prompt: Observation
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    most_attempts: int | None = None
    most_turns: int | None = None
    recording: TaskRecording | None = None

    def attempts(self, samples: int) -> int:
        """Attempts at this task in a run with so many samples per prompt."""
        return min(samples, self.most_attempts or samples)


@dataclass
class Episode:
    """The state of one attempt, passed to every `Environment.step`, which owns `scratch`."""

    task: Task
    turns: int = 0  # responses so far, the current one included
    turns_left: int | None = None  # that may follow; at 0 nobody reads an observation
    cut: bool = False  # a token limit ended the current response
    scratch: dict[str, Any] = field(default_factory=dict)
    opening: Step | None = None  # stop, tools and max_tokens of the first response
    sampled: Any = None  # `rlflow.environment.SaidTokens`: the current response as tokens
    unshown: Exception | None = None  # why the model cannot be shown what `overflow` replaces


@dataclass
class Step:
    """An environment's answer to one model turn."""

    observation: Observation = ""  # text appended verbatim, or messages for the chat template
    reward: float = 0.0  # added to the episode's return; `rewards`: to those of their names
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)  # a later step's replace earlier ones
    replace: dict[int, str] | None = None  # earlier observations, by turn: a new segment
    stop: tuple[str, ...] | None = None  # of the next response; None: the environment's
    rewards: dict[str, float] = field(default_factory=dict)  # for methods that weigh several
    after: int | None = None  # turn that the observation follows; -1: none, it is a prompt
    tools: Sequence[dict[str, Any]] | None = None  # beside a prompt; None: the environment's
    max_tokens: int | None = None  # of the next response, where the run's limits give more
    picture: str = ""  # a data URL, for who looks at the episode
    waited_s: float = 0.0  # of this answer: for a place to work in, no part of the turn's seconds
    template_options: Mapping[str, Any] | None = None  # beside a prompt, over the run's


@dataclass
class Segment:
    """One training sequence, (T,) each, tokens exactly as fed and sampled."""

    tokens: Tensor  # int64
    loss_mask: Tensor  # bool: sampled by the policy
    logprobs: Tensor | None  # float32, nats, of the behaviour policy; 0 elsewhere; None: unknown
    versions: Tensor  # int64: weight version that sampled the token; -1 elsewhere
    routes: Tensor | None = None  # (N, layers, k): experts of the first N tokens, where known
    routes_version: int = -1  # the oldest weights that chose one of them; -1: not known

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
    picture: str = ""


@dataclass
class Trajectory:
    """One finished attempt.

    reward: the sum of its step rewards; rewards: the same of each named one. group_stats: (size,
    mean, std with Bessel's correction) over its group's usable attempts, stamped while the group
    was whole; rewards_stats: (mean, std) by name, 0 standing for an attempt that never got it."""

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
    error: str = ""  # of an aborted attempt, or of one that the policy made unscorable
    id: str = ""  # unique in the run; a resumed run gives the same attempt the same one
    rewards: dict[str, float] = field(default_factory=dict)
    rewards_stats: dict[str, tuple[float, float]] = field(default_factory=dict)
    compared: bool = True  # with its group: it counts when statistics are stamped again

    def __repr__(self) -> str:
        size = f"{len(self.turns)} turns, {sum(map(len, self.segments))} tokens"
        ended = f"reward {self.reward:g}, {self.stop.value}"
        return f"Trajectory({str(self.task_id)[:60]!r}, {size}, {ended})"

    @property
    def usable(self) -> bool:
        return self.stop is not StopReason.ABORTED

    @property
    def unscorable(self) -> bool:
        """Whether the policy made it impossible to score, so that it counts as wrong."""
        return self.usable and bool(self.error)


@dataclass
class Group:
    """The attempts at one task, aborted ones (which are not `usable`) included."""

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
    """Writes a whole group's reward statistics on each of its usable and `compared` attempts."""
    usable = [one for one in trajectories if one.usable and one.compared]
    if not usable:
        return
    stats = (len(usable), *_mean_and_std([trajectory.reward for trajectory in usable]))
    names = sorted({name for trajectory in usable for name in trajectory.rewards})
    named = {name: _mean_and_std([one.rewards.get(name, 0.0) for one in usable]) for name in names}
    for trajectory in usable:
        trajectory.group_stats, trajectory.rewards_stats = stats, dict(named)


def _mean_and_std(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
"""Extras, (B, T, k), for `top_logprobs`: the teacher's k likeliest tokens at t; their log-probs."""
Source = Literal["local", "external", "replay", "demonstration"]
SOURCES: tuple[Source, ...] = get_args(Source)
"""Origins of a trajectory: the run's own rollout, a peer's, an earlier step's, a teacher's hand."""
NAMED_REWARD, NAMED_MEAN, NAMED_STD = "reward/", "reward_mean/", "reward_std/"
"""Prefixes in `Batch.extras`, (B,) float64: a trajectory's named return, its group's statistics."""


@dataclass
class Batch:
    """The rows of an update: segments, right-padded to T tokens; position t describes token t.

    Every batch has the first seven fields; `require` reads the others, where `make_batch` or the
    training step filled them. `weights` are each token's share in the mean, for every loss term;
    `coefficients` are importance corrections and keep-masks, for policy-gradient kernels alone, so
    that KL, entropy and likelihood terms keep their own size."""

    tokens: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool: sampled by the policy that is trained
    logprobs: Tensor  # (B, T) of the behaviour policy; 0 where not sampled or not known
    advantages: Tensor  # (B, T)
    weights: Tensor  # (B, T): sums to 1 over an optimizer step, all ranks together; 0 off the mask
    lengths: Tensor  # (B,) int64, tokens without padding
    temperatures: Tensor  # (B,) at which the row was sampled

    # By `make_batch`; of a group its usable attempts' while it was whole, size 0 where not stamped.
    logprobs_known: Tensor | None = None  # (B,) bool: `logprobs` are those of who sampled the row
    versions: Tensor | None = None  # (B, T) int64: weights that sampled the token, -1 elsewhere
    rewards: Tensor | None = None  # (B,) float64: return of the row's trajectory
    group: Tensor | None = None  # (B,) int64: number of the row's group, by order of appearance
    group_size: Tensor | None = None  # (B,) int64
    group_mean: Tensor | None = None  # (B,) float64, of the returns
    group_std: Tensor | None = None  # (B,) float64, of the returns, with Bessel's correction
    trajectory: Tensor | None = None  # (B,) int64: index of the row's trajectory
    attempt: Tensor | None = None  # (B,) int64: which attempt of its group the trajectory is
    segment: Tensor | None = None  # (B,) int64: which segment of its trajectory the row is
    turn: Tensor | None = None  # (B, T) int64: turn that sampled the token, from 0; -1 elsewhere
    turn_rewards: Tensor | None = None  # (B, T) float64: of the token's turn; 0 elsewhere
    token_rewards: Tensor | None = None  # (B, T) float64: earned per token, with reward terms
    turn_durations_s: Tensor | None = None  # (B, T) of the token's turn, environment included
    stop: Tensor | None = None  # (B,) int64: place of the StopReason in `tuple(StopReason)`
    source: Tensor | None = None  # (B,) int64: place of the trajectory's source in SOURCES
    wanted: Tensor | None = None  # (B, T) bool: tokens that `Trainer.score` is asked for; None: all

    # From the trainer, where a component's `needs` says so; nats. "Before" is before the step's
    # first update, `current` just before this minibatch's.
    proximal_logprobs: Tensor | None = None  # (B, T) of the policy before
    reference_logprobs: Tensor | None = None  # (B, T) of the frozen reference
    teacher_logprobs: Tensor | None = None  # (B, T) of the teacher, at the row's temperature
    current_logprobs: Tensor | None = None  # (B, T)
    current_entropy: Tensor | None = None  # (B, T) of the distribution sampled from
    trainer_version: Tensor | None = None  # (B,) int64: weight version of the policy before

    # From the critic before the step's first update; rewards.
    values: Tensor | None = None  # (B, T) of the state before each trained token
    final_values: Tensor | None = None  # (B,) of the state after the row's last token
    returns: Tensor | None = None  # (B, T) targets of `values`, from advantages with a critic

    # From transforms.
    coefficients: Tensor | None = None  # (B, T) factors on policy-gradient kernels; None: all 1
    ratio_low: Tensor | None = None  # (B, T) ends of the clip range; None: as the kernel says
    ratio_high: Tensor | None = None  # (B, T)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # (B, T), means under the weights
    extras: dict[str, Tensor] = field(default_factory=dict)
    """(B,), (B, T) or (B, T, k) tensors of a method's own, by name."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def __repr__(self) -> str:
        sampled = f"{int(self.loss_mask.sum())} sampled, {self.tokens.device}"
        return f"Batch({len(self)} rows of {self.tokens.shape[1]} tokens, {sampled})"

    @property
    def trained(self) -> Tensor:
        """(B, T) bool: tokens that an update needs log-probs of (sampled, or with a weight)."""
        return self.loss_mask | (self.weights != 0)

    def require(self, name: str, who: str) -> Tensor:
        """The optional field of that name. Raises RLFlowError, naming `who`, where it is empty."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise RLFlowError(
                f"{who}: the batch has no {name}, expected it "
                f"{_FILLED.get(name, 'from make_batch')}. A component whose `needs` name it gets "
                "it from the training step."
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
        """The batch with `change` of each of its tensors, `metrics` and `extras` included."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return None if value is None else change(value)

        return replace(self, **{key: changed(one) for key, one in vars(self).items()})

    def replace(self, **changes: Any) -> Batch:
        """A copy with fields exchanged; `metrics` and `extras` are merged into the present ones."""
        for name in ("metrics", "extras"):
            changes[name] = {**getattr(self, name), **changes.get(name, {})}
        return replace(self, **changes)


_FILLED = {
    "proximal_logprobs": "from trainer.score(batch)['logprobs'] before the first update",
    "reference_logprobs": "from trainer.snapshot('reference'), then score(model='reference')",
    "teacher_logprobs": "from algorithm.teacher",
    "current_logprobs": "from trainer.score(minibatch)['logprobs'] before its update",
    "current_entropy": "from trainer.score(minibatch, want=('entropy',)) before its update",
    "trainer_version": "from the training step",
    "values": "from trainer.score(batch, want=('values',)) before the first update",
    "final_values": "from the critic, with `values`",
    "returns": "from an advantage that is made with a critic, such as gae",
}


@dataclass
class PolicyOutput:
    """The trainer's results with gradients for a batch, (B, T): position t describes token t;
    position 0, padding and what is not `Batch.trained` are 0.

    Beyond `logprobs` there is what the loss `needs`. entropy: of the distribution that token t was
    drawn from, nats, at the row's temperature. top_logprobs: (B, T, k), of the batch's
    TEACHER_TOP_IDS. values: of the state before token t, by a critic, whose `logprobs` are NaN."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_logprobs: Tensor | None = None


LossResult = tuple[Tensor, dict[str, Tensor]]
Reduction = Literal["mean", "max", "sum"]


class Loss(ABC):
    """(PolicyOutput, Batch) -> loss (B, T) to minimize, detached metrics {name: (B, T)}.

    A loss never sums or normalizes: `Batch.weights` does. A metric is reported as its mean under
    the weights, sum(weights * metric) / sum(weights), or as `reductions` says."""

    needs: frozenset[str] = frozenset()
    """Inputs beyond log-probs: `entropy`, `values` and `top_logprobs` of PolicyOutput; `proximal`,
    `reference` and `teacher` log-probs of the batch. A step fills the union over its components."""
    vanishes_at_zero_advantage: bool = False
    """Loss and gradient are 0 where the advantage is: updates leave rows without one out."""
    reductions: Mapping[str, Reduction] = {}
    """Metrics that become one number by `max` or `sum` over trained tokens, not by `mean`."""
    refreshes: Mapping[str, int] = {}
    """Snapshots of the policy to renew, and after how many steps: {"reference": 100}."""

    @property
    def terms(self) -> tuple[Loss, ...]:
        """The losses that it is the sum of; itself alone where it is none."""
        return (self,)

    @abstractmethod
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult: ...

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Receives each update's metrics, on the controller: a loss may remember them."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON-able values; {} where nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""

    def split(self) -> tuple[Loss | None, Loss | None]:
        """(the policy's loss, the critic's loss); a loss that is no sum is one of them."""
        return (None, self) if "values" in self.needs else (self, None)


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function as a loss that needs log-probs only."""

    function: Callable[[PolicyOutput, Batch], LossResult]

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return self.function(output, batch)


def as_loss(loss: Loss | Callable[[PolicyOutput, Batch], LossResult]) -> Loss:
    """The loss, wrapped if it is a function. Raises ConfigError as `check_needs` does."""
    if isinstance(loss, type) or not callable(loss):
        raise ConfigError(f"expected a loss, as PPOClipLoss(), or a function, found {loss!r:.80}.")
    made = loss if isinstance(loss, Loss) else FunctionLoss(loss)
    check_needs(made)
    return made


def check_needs(part: Any) -> None:
    """Raises ConfigError where `needs` is no set: of a text each letter would be a name."""
    if not isinstance(part.needs, (set, frozenset)):
        names = part.needs if isinstance(part.needs, (tuple, list)) else [part.needs]
        raise ConfigError(
            f"{type(part).__name__}.needs: expected a set of names, found {part.needs!r}; write "
            f"needs = frozenset({{{', '.join(map(repr, names))}}})."
        )
