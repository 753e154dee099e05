"""Finds faults that no error shows, by signs that no correct run shows for long: groups that stop
to differ, responses that are cut, an entropy that is gone, an engine with other weights."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.errors import did_you_mean
from rlflow.report.lines import Records, is_step, values_of
from rlflow.report.metrics import METRICS, Metrics, label, leading_score, training_name

LASTING = 3  # steps in a row that a sign must be seen in
ENTROPY_STEPS, ENTROPY_LEFT = 5, 0.1  # of steps; of the entropy before them
FULL = 0.95  # of a score between 0 and 1: what is left is noise
WORTH_LOSING = 0.05  # nats per token: below it a policy was already certain
GAP, GAP_RISE, GAP_LEAST = 0.1, 10.0, 0.01
"""Nats per token: a gap above the first is drift whatever it was; one above the last, if it is so
many times what it was. Half precision explains some hundredths of a nat at the most."""
LOST = 0.05  # share of episodes lost to infrastructure
FEW = 0.2  # of the first step's groups: where fewer differ, most of its work teaches nothing
NO_DIFFERENCE, ALL_SOLVED = "no group differs", "every task is solved"
FEW_DIFFER = "few groups differ"
NEVER_STOPPING, CERTAIN = "responses never stop", "the entropy is gone"
ROUNDED = "adapters are rounded away"
DRIFT, LOSING = "engine and trainer disagree", "episodes are lost"
COLLAPSED, FREE = "a router has collapsed", "engine and trainer route apart"
ARRIVED = 0.5
"""Share of what adapters add: below it the engines' policy is nearer to that of the start than to
the trained one."""
SPREAD_LEAST = 0.02
"""Of an even load: below it all tokens go to the same experts."""
FREE_GAP = 0.02
"""Nats per token, as GAP, of a model with experts whose trainer routes tokens itself."""


@dataclass(frozen=True)
class Fault:
    """name: a short one. text: sentences, with figures and what to do. step: where it showed."""

    name: str
    text: str
    step: int | None = None

    @property
    def title(self) -> str:
        """The name, with the step where there is one."""
        return self.name if self.step is None else f"{self.name} (step {self.step})"


class Watch:
    """Watches the metrics of one step after another; tells each fault once.

    registered: the metrics of the environment, whose alarms count too."""

    def __init__(self, registered: Metrics) -> None:
        self._registered = registered
        self._recent: deque[Mapping[str, float]] = deque(maxlen=ENTROPY_STEPS + 1)
        self._first_gaps: list[float] = []
        self._scores: list[float] = []
        self._steps = 0
        self._told: set[str] = set()

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Fault]:
        """The new faults that a training step's metrics show."""
        self._recent.append(metrics)
        self._steps += 1
        if len(self._first_gaps) < LASTING and "train/logprob_gap" in metrics:
            self._first_gaps.append(metrics["train/logprob_gap"])
        recent, known = list(self._recent), self._registered
        if "train/reward" in metrics:
            self._scores.append(_score(metrics, known))
        texts = {
            DRIFT: drift(recent, self._first_gaps),
            LOSING: episodes_lost(recent),
            COLLAPSED: router_collapse(recent),
            FREE: routed_apart(recent),
            NEVER_STOPPING: all_cut(recent),
            ALL_SOLVED: all_solved(recent, known),
            NO_DIFFERENCE: no_difference(recent, known),
            FEW_DIFFER: few_differ(metrics) if self._steps == 1 else "",
            CERTAIN: self._certain(recent),
            ROUNDED: rounded_away(recent),
            **{label(name): alarm(recent, name, known) for name in known},
            **undeclared(metrics, known),
        }
        found = {key: text for key, text in texts.items() if text and key not in self._told}
        self._told |= found.keys()
        return [Fault(name, text, step) for name, text in found.items()]

    def _certain(self, recent: Records) -> str:
        """The sign that the entropy is gone; of recordings, which have no score, it may go."""
        if not self._scores or succeeding(self._scores):
            return ""
        return entropy_collapse(recent)

    def recall(self, records: Records) -> list[Fault]:
        """The faults of earlier sessions' records, which are not told again."""
        trained = [one for one in records if is_step(one)]
        return [fault for one in trained for fault in self.observe(int(one["step"]), one)]


def no_difference(recent: Records, registered: Metrics) -> str:
    """No attempt was better than the others at its task, step after step.

    Not told where all tasks are solved, or where all attempts are cut, which is why then."""
    scores = _scores_without_difference(recent, registered)
    if not scores or set(scores) == {1.0} or all_cut(recent):
        return ""
    reward = statistics.fmean(one.get("train/reward", 0.0) for one in recent[-LASTING:])
    none_solved = (
        "No task is solved: they are too hard. Take easier ones, reward for a part of the way, or "
        "a policy that solves some of them (rlflow env policy)."
    )
    always_alike = (
        "Each task ends the same way at every attempt. Take tasks in between, or more "
        "rollout.samples_per_prompt; and look whether the reward tells right from wrong."
    )
    return (
        f"No group differed in reward for {LASTING} steps (mean reward {reward:.2f}): there is "
        "nothing to learn from, and the policy stays as it is. "
        f"{none_solved if max(scores) <= 0 else always_alike}"
    )


def few_differ(first: Mapping[str, float]) -> str:
    """The attempts at most tasks of the first step are all worth the same. Where none differs,
    `no_difference` tells it, if that lasts."""
    share = 1 - first.get("train/advantage_zero", 0.0)
    if not 0 < share < FEW:
        return ""
    return (
        f"The attempts of {share:.0%} of the first step's groups differ in reward "
        f"(mean {first.get('train/reward', 0.0):.2f}); the other groups teach nothing. `rlflow eval "
        "--samples 8 --temperature 0.3,0.6,1.0` tells at which rollout.temperature more would."
    )


def all_solved(recent: Records, registered: Metrics) -> str:
    """Every attempt got the full score (without a score: a reward of 1), step after step."""
    if set(_scores_without_difference(recent, registered)) != {1.0}:
        return ""
    return (
        f"Every task is solved, for {LASTING} steps: the tasks are too easy, and there is nothing "
        "left to learn from them. Take harder ones, or end the run (run.target)."
    )


def _scores_without_difference(recent: Records, registered: Metrics) -> list[float]:
    """The leading scores of the last steps where no group differed in any; else nothing. Rewards
    where it is no share: of levels the first is 1, too."""
    flat = _lasting(recent, "train/advantage_zero")
    if not flat or min(flat) < 1:
        return []
    return [_score(one, registered) for one in recent[-LASTING:]]


def _score(metrics: Mapping[str, float], registered: Metrics) -> float:
    """The leading score of a step; its reward where that is no share."""
    shares = {name: one for name, one in registered.items() if one.unit in ("share", "1")}
    return metrics.get(f"train/{leading_score(shares, metrics, 'train')}", 0.0)


def succeeding(scores: Sequence[float]) -> bool:
    """Whether the steps' scores are nearly full now, or above the first ones and no worse than the
    best ones, by more than their noise.

    The noise is that of the differences between successive steps (J. von Neumann 1941), so that a
    steady rise is none."""
    if len(scores) < 2 * LASTING:
        return False
    runs = [statistics.fmean(scores[at : at + LASTING]) for at in range(len(scores) - LASTING + 1)]
    if runs[-1] >= FULL and max(scores) <= 1:
        return True
    changes = [after - before for before, after in itertools.pairwise(scores)]
    noise = statistics.pstdev(changes) / 2**0.5
    margin = 2 * noise * (2 / LASTING) ** 0.5  # two standard errors of a difference of two means
    return runs[-1] > runs[0] + margin and runs[-1] >= max(runs) - margin


def all_cut(recent: Records) -> str:
    """No response came to its own end."""
    cut = _lasting(recent, "rollout/responses_cut")
    turns = _lasting(recent, "rollout/turns")
    if not cut or not turns or not min(turns) or any(map(operator.lt, cut, turns)):
        return ""
    return (
        f"All responses are cut, for {LASTING} steps: no stop string matched, and the policy never "
        "ended one itself. Look at one (rlflow show RUN): if it runs on behind its answer, "
        "Environment.stop is not what the policy writes; if it is not done yet, raise "
        "rollout.max_response_tokens."
    )


def entropy_collapse(recent: Records) -> str:
    """The policy became certain of everything within a few steps."""
    values = values_of(recent, "train/entropy")
    if len(values) <= ENTROPY_STEPS or values[0] < WORTH_LOSING:
        return ""
    if values[-1] > ENTROPY_LEFT * values[0]:
        return ""
    ends = f"{values[0]:.2f} to {values[-1]:.2f} nats per token"
    return (
        f"The entropy fell by {1 - values[-1] / values[0]:.0%} in {ENTROPY_STEPS} steps ({ends}): "
        "the policy says the same whatever it tries, and soon stops learning. Lower trainer.lr, "
        "add the loss `entropy` or `kl`, or raise clip_high of ppo_clip; then go on from an "
        "earlier checkpoint (run.resume_step)."
    )


def drift(recent: Records, first_gaps: Sequence[float]) -> str:
    """The engine's log-probs are not the trainer's, though both have the same policy."""
    gaps = _gaps_of_fresh_tokens(recent)
    if not gaps:
        return ""
    # An engine that never gets new weights is right in the first step
    usual = min(first_gaps)
    risen = min(gaps) > GAP_LEAST and min(gaps) > GAP_RISE * usual
    if min(gaps) < GAP and not risen:
        return ""
    return (
        "Engine and trainer drift apart: their log-probs of the same tokens differ by "
        f"{gaps[-1]:.2g} nats on average ({usual:.2g} in the first steps). The engine may hold old "
        "weights, or sample from another distribution than the trainer computes (precision, "
        "kernels, temperature). Check the weight sync first; a correction such as "
        "algorithm.transforms=[tis] bounds what is left."
    )


def rounded_away(recent: Records) -> str:
    """The engines sample from nearly the policy of the start, as their weights are too coarse for
    what adapters add to them."""
    shares = _lasting(recent, "sync/adapters_arrived")
    if not shares or max(shares) >= ARRIVED:
        return ""
    return (
        f"Of what the adapters add to the weights, {shares[-1]:.0%} is in those of the engines, "
        f"for {LASTING} steps: the rest is lost as they are rounded to bfloat16, and episodes are "
        "played by another policy than the one that is trained. Set trainer.lora.sync=adapters "
        "where the engine takes them, or rollout.engine.dtype=float32 (twice its memory)."
    )


def router_collapse(recent: Records) -> str:
    """The router of a layer sends all tokens to the same experts."""
    spread = _lasting(recent, "train/expert_spread")
    if not spread or max(spread) > SPREAD_LEAST:
        return ""
    return (
        f"A router has collapsed: in some layer nearly all tokens go to the same experts, for "
        f"{LASTING} steps, and the others learn nothing (train/expert_spread {spread[-1]:.2g}). "
        "Lower trainer.lr, and go on from an earlier checkpoint (run.resume_step)."
    )


def routed_apart(recent: Records) -> str:
    """Log-probs differ where the trainer routes tokens itself, without the engine's routes."""
    gaps = _gaps_of_fresh_tokens(recent)
    free = _lasting(recent, "train/expert_spread") and not values_of(recent, "train/routes_differ")
    if not free or not gaps or min(gaps) < FREE_GAP:
        return ""
    return (
        f"Engine and trainer differ by {gaps[-1]:.2g} nats per token in a model with experts, each "
        "with routes of its own: some tokens may go to other experts in training than when they "
        "were sampled. Set trainer.router_replay=rollout; what is left then has another reason."
    )


def episodes_lost(recent: Records) -> str:
    """Tools or other infrastructure fail more and more."""
    shares = _lasting(recent, "rollout/aborted")
    if not shares or min(shares) < LOST:
        return ""
    return (
        f"Tool errors rise: {shares[-1]:.0%} of the episodes of a step are lost to infrastructure, "
        f"for {LASTING} steps. They teach nothing; above rollout.faults.max_aborted_share the run "
        "stops. Their `error` stands in log.txt and in trajectories/."
    )


def alarm(recent: Records, name: str, registered: Metrics) -> str:
    """The environment's advice on a metric that stays above its level (`Metric.alarm`)."""
    metric = registered[name]
    values = _lasting(recent, name if "/" in name else training_name(name, registered))
    if metric.alarm is None or not values or min(values) <= metric.alarm:
        return ""
    share = metric.unit == "share"
    shown = f"{values[-1]:.0%}" if share else f"{values[-1]:.3g} {metric.unit}"
    what = f"{label(name).capitalize()} {shown} ({metric.meaning})"
    return f"{what}, for {LASTING} steps. {metric.advice}".strip()


def undeclared(latest: Mapping[str, float], registered: Metrics) -> dict[str, str]:
    """A sentence for each metric of episodes that the environment reports and does not declare,
    where it declares any: perhaps its score, misspelt."""
    known = [name for name in registered if "/" not in name]
    episodes = [name for name in latest if name.startswith("rollout/")]
    others = [one for one in episodes if one not in METRICS and one not in registered]
    names = [one.removeprefix("rollout/") for one in others if known]
    return {
        f"metric {name} is not declared": (
            f"Metric '{name}' is not declared by the environment; declared: {', '.join(known)}."
            f"{did_you_mean(name, known)} It is logged as a mean, and is no score."
        )
        for name in names
        if name not in registered
    }


def _gaps_of_fresh_tokens(recent: Records) -> list[float]:
    """The gaps of the last steps, where the newest weights sampled all tokens; else nothing."""
    stale = values_of(recent[-LASTING:], "rollout/staleness")
    return [] if any(stale) else _lasting(recent, "train/logprob_gap")


def _lasting(recent: Records, name: str) -> list[float]:
    """The metric in the last steps, where all of them have it; else nothing."""
    values = values_of(recent[-LASTING:], name)
    return values if len(values) == LASTING else []
