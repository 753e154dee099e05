"""What goes wrong quietly in reinforcement learning, told in sentences: from the metrics of the last steps, each once in a run.

A run whose reward rises may still learn nothing, or something else: groups that stopped to differ, responses that are cut, an
entropy that is gone, an engine with other weights. The rules here look for signs that no correct run shows for long.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlflow.report.metrics import Metrics, label, leading_score, training_name

Record = Mapping[str, float]
LASTING = 3  # steps in a row that a sign must be seen in
ENTROPY_STEPS, ENTROPY_LEFT = 5, 0.1  # of steps; of the entropy before them
WORTH_LOSING = 0.05  # nats per token: below it a policy was already certain
GAP, GAP_RISE, GAP_LEAST = 0.1, 10.0, 0.01
"""Nats per token: a gap above the first is drift whatever it was; one above the last, if it is so many times what it was. Half
precision explains some hundredths of a nat at the most."""
LOST = 0.05  # share of episodes lost to infrastructure
NO_DIFFERENCE, ALL_SOLVED = "no group differs", "every task is solved"
NEVER_STOPPING, CERTAIN = "responses never stop", "the entropy is gone"
DRIFT, LOSING = "engine and trainer disagree", "episodes are lost"


@dataclass(frozen=True)
class Fault:
    """name: a short one. text: sentences, with figures and what to do. step: where it showed, None for none in particular."""

    name: str
    text: str
    step: int | None = None

    @property
    def title(self) -> str:
        """The name, with the step where there is one."""
        return self.name if self.step is None else f"{self.name} (step {self.step})"


class Watch:
    """Looks at the metrics of one step after another. registered: of the environment, whose alarms count too."""

    def __init__(self, registered: Metrics) -> None:
        self._registered = registered
        self._recent: deque[Record] = deque(maxlen=ENTROPY_STEPS + 1)
        self._first_gaps: list[float] = []
        self._told: set[str] = set()

    def observe(self, step: int, metrics: Record) -> list[Fault]:
        """What is to be told after a training step with these metrics; nothing that was told before."""
        self._recent.append(metrics)
        if len(self._first_gaps) < LASTING and "train/logprob_gap" in metrics:
            self._first_gaps.append(metrics["train/logprob_gap"])
        recent, first = list(self._recent), self._first_gaps
        rules: dict[str, Callable[[], str]] = {
            DRIFT: lambda: drift(recent, first),
            LOSING: lambda: episodes_lost(recent),
            NEVER_STOPPING: lambda: all_cut(recent),
            ALL_SOLVED: lambda: all_solved(recent, self._registered),
            NO_DIFFERENCE: lambda: no_difference(recent, self._registered),
            CERTAIN: lambda: entropy_collapse(recent),
            **{label(name): functools.partial(alarm, recent, name, self._registered) for name in self._registered},
        }
        found = {key: text for key, rule in rules.items() if key not in self._told and (text := rule())}
        self._told |= found.keys()
        return [Fault(name, text, step) for name, text in found.items()]

    def recall(self, records: Sequence[Record]) -> list[Fault]:
        """What was told of the training steps among these records, which is not told again."""
        trained = [record for record in records if "train/reward" in record]
        return [fault for record in trained for fault in self.observe(int(record["step"]), record)]


def faults_of(records: Sequence[Record], registered: Metrics) -> list[Fault]:
    """What a run with these records was told, step after step."""
    return Watch(registered).recall(records)


def no_difference(recent: Sequence[Record], registered: Metrics) -> str:
    """No attempt was better than the others at its task, step after step, and not because all tasks are solved; where all
    attempts are cut, that is why."""
    scores = _scores_without_difference(recent, registered)
    if not scores or set(scores) == {1.0} or all_cut(recent):
        return ""
    reward = statistics.fmean(record.get("train/reward", 0.0) for record in recent[-LASTING:])
    if max(scores) <= 0:
        why = (
            "No task is solved: they are too hard. Take easier ones, reward for a part of the way, or a policy that solves some "
            "of them (rlflow env policy)."
        )
    else:
        why = (
            "Each task ends the same way at every attempt. Take tasks in between, or more rollout.samples_per_prompt; and look "
            "whether the reward tells right from wrong."
        )
    return (
        f"No group differed in reward for {LASTING} steps (mean reward {reward:.2f}): there is nothing to learn from, and the "
        f"policy stays as it is. {why}"
    )


def all_solved(recent: Sequence[Record], registered: Metrics) -> str:
    """Every attempt at every task got the full score (without a score: a reward of 1), step after step."""
    scores = _scores_without_difference(recent, registered)
    if set(scores) != {1.0}:
        return ""
    return (
        f"Every task is solved, for {LASTING} steps: the tasks are too easy, and there is nothing left to learn from them. Take "
        "harder ones, or end the run (run.target)."
    )


def _scores_without_difference(recent: Sequence[Record], registered: Metrics) -> list[float]:
    """The first score, without one the reward, of the last steps, where no group differed in any of them; else nothing."""
    flat = _lasting(recent, "train/advantage_zero")
    if not flat or min(flat) < 1:
        return []
    return [record.get(f"train/{leading_score(registered, record, 'train')}", 0.0) for record in recent[-LASTING:]]


def all_cut(recent: Sequence[Record]) -> str:
    """No response came to its own end."""
    cut, turns = _lasting(recent, "rollout/responses_cut"), _lasting(recent, "rollout/turns")
    if not cut or not turns or any(one < all_ for one, all_ in zip(cut, turns, strict=True)) or not min(turns):
        return ""
    return (
        f"All responses are cut, for {LASTING} steps: no stop string matched, and the policy never ended one itself. Look at "
        "one (rlflow show RUN): if it runs on behind its answer, Environment.stop is not what the policy writes; if it is not "
        "done yet, raise rollout.max_response_tokens."
    )


def entropy_collapse(recent: Sequence[Record]) -> str:
    """The policy became certain of everything within a few steps."""
    values = [record["train/entropy"] for record in recent if "train/entropy" in record]
    if len(values) <= ENTROPY_STEPS or values[0] < WORTH_LOSING or values[-1] > ENTROPY_LEFT * values[0]:
        return ""
    fell = f"{1 - values[-1] / values[0]:.0%} in {ENTROPY_STEPS} steps ({values[0]:.2f} to {values[-1]:.2f} nats per token)"
    return (
        f"The entropy fell by {fell}: the policy says the same whatever it tries, and soon stops learning. Lower trainer.lr, "
        "add the loss `entropy` or `kl`, or raise clip_high of ppo_clip; then go on from an earlier checkpoint "
        "(run.resume_step)."
    )


def drift(recent: Sequence[Record], first_gaps: Sequence[float]) -> str:
    """The engine's log-probs are not the trainer's, though the policy that sampled is the one that is trained."""
    gaps = _lasting(recent, "train/logprob_gap")
    if not gaps or any(record.get("rollout/staleness", 0.0) > 0 for record in recent[-LASTING:]):
        return ""
    usual = min(first_gaps)  # an engine that never gets new weights is right in the first step
    if min(gaps) < GAP and not (min(gaps) > GAP_LEAST and min(gaps) > GAP_RISE * usual):
        return ""
    return (
        f"Engine and trainer drift apart: their log-probs of the same tokens differ by {gaps[-1]:.2g} nats on average "
        f"({usual:.2g} in the first steps). The engine may hold old weights, or sample from another distribution than the "
        "trainer computes (precision, kernels, temperature). Check the weight sync first; a correction such as "
        "algorithm.transforms=[tis] bounds what is left."
    )


def episodes_lost(recent: Sequence[Record]) -> str:
    """Tools or other infrastructure fail more and more."""
    shares = _lasting(recent, "rollout/aborted")
    if not shares or min(shares) < LOST:
        return ""
    return (
        f"Tool errors rise: {shares[-1]:.0%} of the episodes of a step are lost to infrastructure, for {LASTING} steps. They "
        "teach nothing; above rollout.faults.max_aborted_share the run stops. Their `error` stands in log.txt and in "
        "trajectories/."
    )


def alarm(recent: Sequence[Record], name: str, registered: Metrics) -> str:
    """What the environment registered for a metric that must not be above a level for long (`Metric.alarm`)."""
    metric = registered[name]
    values = _lasting(recent, name if "/" in name else training_name(name, registered))
    if metric.alarm is None or not values or min(values) <= metric.alarm:
        return ""
    shown = f"{values[-1]:.0%}" if metric.unit == "share" else f"{values[-1]:.3g} {metric.unit}"
    return f"{label(name).capitalize()} {shown} ({metric.meaning}), for {LASTING} steps. {metric.advice}".strip()


def _lasting(recent: Sequence[Record], name: str) -> list[float]:
    """The metric in the last steps, where all of them have it; else nothing."""
    values = [record[name] for record in recent[-LASTING:] if name in record]
    return values if len(values) == LASTING else []
