"""Metrics with their units and meanings: the core's table, and those of an environment.

A name is `section/name`. A metric of an environment's episodes is registered without a section: it
is logged as `rollout/<name>` (a score as `train/<name>`) and `eval/<name>`. With a section it is
one of `Environment.report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import ConfigError, did_you_mean
from rlflow.storage.files import read_json, write_json

PHASES = ("rollout", "score", "update", "sync", "evaluate", "checkpoint")
REDUCTIONS = ("mean", "max", "min", "sum")


@dataclass(frozen=True)
class Metric:
    """A number's unit and meaning.

    reduction: of the values of several episodes or minibatches. score: says how well an episode
    went; one that lacks it got 0, evaluations give its 95% interval, and an environment's first
    score leads every display. shown: its form in the progress line, e.g. "tools {:.2f}"; metrics
    other than scores stand there only with it. share_of: a metric in seconds, whose share of the
    step's seconds this one is. alarm: a run that is above it for three steps warns once, with
    `advice`. Raises ConfigError for an unknown reduction or a format that formats no number."""

    unit: str
    meaning: str
    reduction: str = "mean"
    score: bool = False
    shown: str = ""
    chart: bool = False
    share_of: str = ""
    alarm: float | None = None
    advice: str = ""

    def __post_init__(self) -> None:
        name = f"metric '{self.meaning}'"
        if self.reduction not in REDUCTIONS:
            told = f"expected one of {', '.join(REDUCTIONS)}, found '{self.reduction}'"
            hint = did_you_mean(self.reduction, REDUCTIONS)
            raise ConfigError(f"{name}: reduction: {told}.{hint}")
        try:
            self.shown.format(0.5)
        except (ValueError, IndexError, KeyError) as error:
            told = "expected a format of one number such as 'tools {:.2f}'"
            raise ConfigError(f"{name}: shown: {told}, found '{self.shown}' ({error}).") from None


Metrics = Mapping[str, Metric]


_PHASE_MEANING = {
    "rollout": "collecting the step's episodes",
    "score": "forward passes without gradients: reference, recomputed log-probs",
    "update": "forward and backward passes and optimizer steps",
    "sync": "sending the new weights to the engines, verification included",
    "evaluate": "evaluation",
    "checkpoint": "writing checkpoints",
}


METRICS: Metrics = {
    "train/loss": Metric("nats", "the minimized loss, mean over the step's minibatches"),
    "train/reward": Metric("reward", "mean return of the usable episodes"),
    "train/shaped_reward": Metric(
        "reward", "as train/reward, with what algorithm.transforms added"
    ),
    "train/gradient_norm": Metric(
        "1", "global L2 norm before clipping, mean over minibatches", shown="grad {:.2f}"
    ),
    "train/lr": Metric("1", "learning rate of the step's last minibatch"),
    "train/clip_fraction": Metric(
        "share", "of trained tokens in the rows that were fed whose ratio was clipped"
    ),
    "train/ratio": Metric(
        "1",
        "mean importance ratio, policy / old policy (the kernel's anchor), over trained tokens",
    ),
    "train/old_kl": Metric("nats/token", "KL(old policy || policy), the same two (k3 estimator)"),
    "train/policy_loss": Metric("nats", "the clipped policy-gradient term alone"),
    "train/kept": Metric(
        "share", "of trained tokens that transforms left in the policy-gradient terms"
    ),
    "train/coefficient": Metric(
        "1",
        "mean factor of transforms on the policy-gradient terms, over trained tokens",
    ),
    "train/capped": Metric(
        "share", "of trained tokens whose importance weight is beyond a transform's cap"
    ),
    "train/ratio_low": Metric(
        "1", "lower end of the clip range of ratios, where a transform sets it"
    ),
    "train/ratio_high": Metric(
        "1", "upper end of the clip range of ratios, where a transform sets it"
    ),
    "train/second_moment": Metric(
        "nats^2",
        "mean square of the log-ratios that a transform bounds, before it does",
    ),
    "train/value_loss": Metric("reward^2", "the critic's loss per trained token (value)"),
    "train/value_clip_fraction": Metric(
        "share", "of trained tokens whose value moved beyond the clip"
    ),
    "train/value": Metric(
        "reward",
        "mean value of the states before trained tokens, before the step's first update",
    ),
    "train/return": Metric("reward", "mean return that the critic learns, over the same tokens"),
    "train/value_explained_variance": Metric(
        "1",
        "1 - var(return - value) / var(return) over the same tokens: 1 at best; left out where all "
        "returns are equal",
    ),
    "train/critic_loss": Metric(
        "reward^2", "the critic's minimized loss, mean over the step's minibatches"
    ),
    "train/critic_gradient_norm": Metric(
        "1", "global L2 norm of the critic before clipping, mean over minibatches"
    ),
    "train/critic_lr": Metric("1", "learning rate of the critic, mean over minibatches"),
    "train/nll": Metric("nats/token", "negative log-likelihood, with the sft loss"),
    "train/kl": Metric(
        "nats/token",
        "KL of the policy to the reference (the loss's estimator; of wk3 its k3)",
    ),
    "train/teacher_gap": Metric(
        "nats/token",
        "log-prob of sampled tokens less the teacher's, before the update: estimates KL(policy || "
        "teacher)",
    ),
    "train/teacher_kl": Metric(
        "nats/token",
        "KL(teacher || policy) over the teacher's likeliest tokens (teacher_kl loss)",
    ),
    "train/teacher_mass": Metric("share", "of the teacher's probability on those tokens"),
    "train/entropy": Metric(
        "nats/token", "entropy of the distribution sampled from", shown="entropy {:.2f}"
    ),
    "train/entropy_coefficient": Metric("1", "of the entropy bonus, with the entropy_target loss"),
    "train/logprob_gap": Metric(
        "nats",
        "mean absolute difference of engine and trainer log-probs of sampled tokens, before the "
        "update",
        shown="gap {:.1e}",
    ),
    "train/expert_load_max": Metric(
        "1",
        "tokens of the busiest expert of any layer, in shares of an even load, by the routes that "
        "are replayed; without replay by the trainer's own, of four rows",
    ),
    "train/expert_spread": Metric(
        "share",
        "of the way from all tokens at the same experts (0) to an even load (1), in the layer that "
        "spreads least: exp(entropy of the load), less the experts of a token",
    ),
    "train/router_aux_loss": Metric(
        "1",
        "load-balancing loss over an update's tokens without its coefficient, mean over layers: "
        "the experts of a token at an even load (trainer.balance)",
    ),
    "train/router_z_loss": Metric(
        "1", "squared log-sum-exp of the routers' logits, likewise (trainer.balance)"
    ),
    "train/routes_differ": Metric(
        "share",
        "of the rollout's routes that the trainer chooses otherwise, over four rows, of the newest "
        "weights where there are some (router_replay=rollout)",
    ),
    "train/logprob_gap_free": Metric(
        "nats", "as train/logprob_gap, of these rows with the trainer's own routes"
    ),
    "train/logprob_gap_replayed": Metric(
        "nats", "the same with the rollout's routes, as updates have them"
    ),
    "train/advantage_zero": Metric(
        "share",
        "of episodes without any advantage (where a group is compared: of groups that score "
        "alike): "
        "they teach nothing",
    ),
    "train/tokens": Metric("tokens", "trained in the step (loss mask)"),
    "train/fed_tokens": Metric("tokens", "in the training rows, padding excluded"),
    "train/microbatches": Metric("count", "per optimizer step and data-parallel rank"),
    "train/updates_skipped": Metric(
        "count",
        "updates of the step without any gradient: the optimizer made no step; left out where it "
        "is 0",
        "sum",
    ),
    "rollout/episodes": Metric("count", "collected in the step, aborted ones included"),
    "rollout/turns": Metric("per episode", "responses of the policy"),
    "rollout/response_tokens": Metric("tokens/episode", "sampled by the policy"),
    "rollout/observation_tokens": Metric("tokens/episode", "fed from the environment"),
    "rollout/responses_cut": Metric("per episode", "responses that a token limit cut"),
    "rollout/observations_cut": Metric(
        "per episode", "observations cut to rollout.max_observation_tokens"
    ),
    "rollout/forks": Metric(
        "per episode",
        "times that earlier turns were rewritten or left; each starts a segment",
    ),
    "rollout/refed_tokens": Metric(
        "tokens/episode",
        "fed again after forks, rewritten: what was in view before them",
    ),
    "rollout/truncated_max_turns": Metric(
        "share", "of episodes cut by rollout.max_turns", shown="cut at turns {:.0%}"
    ),
    "rollout/truncated_max_tokens": Metric(
        "share", "of episodes cut by a token budget", shown="cut at tokens {:.0%}"
    ),
    "rollout/aborted": Metric(
        "share", "of episodes lost to infrastructure; out of loss and baseline"
    ),
    "rollout/unscorable": Metric(
        "share",
        "of episodes that the policy made impossible to score: they count as wrong; left out where "
        "it is 0",
    ),
    "rollout/staleness": Metric(
        "versions", "that trained tokens lag behind the weights in training"
    ),
    "rollout/staleness_max": Metric(
        "versions",
        "of the oldest token; at most rollout.asynchronous.max_staleness",
        "max",
    ),
    "rollout/on_policy": Metric("share", "of trained tokens that the weights in training sampled"),
    "rollout/groups_ahead": Metric("count", "groups that are finished and wait for a later step"),
    "rollout/groups_running": Metric("count", "groups under way beyond the step"),
    "rollout/groups_stale": Metric(
        "count", "groups that were too old for the step and are sampled again", "sum"
    ),
    "rollout/groups_short": Metric(
        "count",
        "groups that ended without the attempts that ran longer than group_s",
        "sum",
    ),
    "rollout/engine_restarts": Metric(
        "count",
        "engines that ended and were started again, in this session of the run",
        "max",
    ),
    "workers/up": Metric("count", "rollout workers that are up at the end of the step"),
    "workers/restarts": Metric("count", "rollout workers that were started again", "sum"),
    "workers/attempts_lost": Metric(
        "count", "attempts that were lost with a rollout worker and issued again", "sum"
    ),
    "workers/attempts_most": Metric("count", "attempts that ended on the worker that ended most"),
    "workers/attempts_fewest": Metric(
        "count", "attempts that ended on the worker that ended fewest"
    ),
    "sync/mib": Metric(
        "MiB",
        "of weights that went to all engines together; of rollout workers, what they read since "
        "the step before",
        "sum",
    ),
    "sync/delta_share": Metric(
        "share",
        "of these reads that got what had changed; the others got whole weights",
    ),
    "sync/adapters_arrived": Metric(
        "share",
        "of what LoRA adapters add to the weights that is in those of the engines, where they get "
        "merged ones: 1 less the norm of what rounding loses over that of what was added",
    ),
    "sync/adapters_applied": Metric(
        "share",
        "of what LoRA adapters change in the log-probs of sampled tokens that is in the engines', "
        "where they get adapters alone: 1, or a half where rounding hides the change. Measured in "
        "steps 1, 2, 4, 8 and every 16th",
    ),
    "time/sync_gather_s": Metric("s", "the trainer making full tensors"),
    "time/sync_publish_s": Metric("s", "hashing and storing them for rollout workers"),
    "time/sync_read_s": Metric(
        "s", "reading and verifying them, of the slowest rollout worker", "max"
    ),
    "time/sync_load_s": Metric(
        "s",
        "engines taking them over; of the slowest rollout worker, verification included",
        "max",
    ),
    "time/sync_verify_s": Metric("s", "comparing what engines have, by hash or probe"),
    "data/prompts_dropped": Metric(
        "count", "prompts over data.max_prompt_tokens, of the training split"
    ),
    "data/epoch": Metric("epochs", "passes over the training tasks so far"),
    "speed/tokens_per_s": Metric(
        "tokens/s",
        "train/fed_tokens by the seconds of the whole step",
        shown="{:,.0f} tokens/s",
    ),
    **{f"time/{phase}_s": Metric("s", _PHASE_MEANING[phase]) for phase in PHASES},
    "time/step_s": Metric("s", "the whole step"),
    "time/run_s": Metric(
        "s",
        "the run so far, from its start on and all its sessions: loading, steps, evaluations, "
        "checkpoints",
    ),
    **{f"memory/{phase}_gib": Metric("GiB", f"peak, {_PHASE_MEANING[phase]}") for phase in PHASES},
    "memory/engine_freed_gib": Metric(
        "GiB", "that engines gave back before the trainer's turn on their device"
    ),
    "memory/engine_taken_gib": Metric("GiB", "that they took again with the new weights"),
    "eval/reward": Metric("reward", "mean return"),
    "eval/reward_low": Metric("reward", "lower end of its 95% interval"),
    "eval/reward_high": Metric("reward", "upper end of its 95% interval"),
    "eval/nll": Metric(
        "nats/token", "negative log-likelihood of the trained tokens, with rollout.engine: recorded"
    ),
    "eval/tokens": Metric("tokens", "that it is a mean over"),
    "eval/turns": Metric("per task", "responses of the policy"),
    "eval/response_tokens": Metric("tokens/task", "sampled by the policy"),
    "eval/questions": Metric("count", "tasks with an attempt that did not fail"),
    "eval/attempts": Metric(
        "count",
        "attempts at them (evaluation.samples_per_prompt each), failed ones left out",
    ),
    "eval/failed": Metric(
        "count", "attempts lost to infrastructure: reported apart, never scored 0"
    ),
    "eval/asked": Metric("count", "attempts that were to be made: scored and failed ones"),
    "eval/unscorable": Metric(
        "count",
        "attempts that the policy made impossible to score: they count as wrong; left out where it "
        "is 0",
    ),
}


def scores(registered: Metrics) -> list[str]:
    """The names of an environment's scores; displays and `run.target` go by the first."""
    return [name for name, metric in registered.items() if metric.score]


def leading_score(registered: Metrics, names: Collection[str], *sections: str) -> str:
    """The first score that stands as `section/<name>` among the names, else `reward`."""
    for name in scores(registered):
        if any(f"{section}/{name}" in names for section in sections):
            return name
    return "reward"


def training_name(name: str, registered: Metrics) -> str:
    """A metric of episodes in training: `train/<name>` for a score, else `rollout/<name>`."""
    return f"{'train' if name in registered and registered[name].score else 'rollout'}/{name}"


def label(name: str) -> str:
    """A metric's name in words."""
    return name.rpartition("/")[2].replace("_", " ")


def shown(name: str, metric: Metric, value: float) -> str:
    """The metric as it stands in a line for people."""
    return (metric.shown or f"{label(name)} {{:.3f}}").format(value)


def save_registered(path: str | Path, registered: Metrics) -> None:
    """Writes an environment's metrics, so that its run can be read without it."""
    write_json(path, {name: dataclasses.asdict(metric) for name, metric in registered.items()})


def load_registered(path: str | Path) -> dict[str, Metric]:
    """The metrics that `save_registered` wrote; none without the file. Raises CheckpointError for a
    damaged one."""
    if not Path(path).is_file():
        return {}
    known = {field.name for field in dataclasses.fields(Metric)}
    return {
        name: Metric(**{key: value for key, value in row.items() if key in known})
        for name, row in read_json(path).items()
    }
