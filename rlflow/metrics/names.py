"""Metric names with their units and meanings: one table. A name is `section/name`; an environment's own metrics
appear as `rollout/<name>` and `eval/<name>`."""

from __future__ import annotations

from typing import NamedTuple

SCORES = ("exact_match", "f1")  # of an episode, whatever the environment


PHASES = ("rollout", "score", "update", "sync", "evaluate", "checkpoint")


class Metric(NamedTuple):
    unit: str
    meaning: str


_PHASE_MEANING = {
    "rollout": "collecting the step's episodes",
    "score": "forward passes without gradients: reference, recomputed log-probs",
    "update": "forward and backward passes and optimizer steps",
    "sync": "sending the new weights to the engines, verification included",
    "evaluate": "evaluation",
    "checkpoint": "writing checkpoints",
}


METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats", "the minimized loss, mean over the step's minibatches"),
    "train/reward": Metric("reward", "mean return of the usable episodes"),
    "train/exact_match": Metric("share", "of the training episodes, at the sampling temperature"),
    "train/f1": Metric("share", "mean token F1 of the training episodes"),
    "train/gradient_norm": Metric("1", "global L2 norm before clipping, mean over minibatches"),
    "train/lr": Metric("1", "learning rate of the step's last minibatch"),
    "train/clip_fraction": Metric("share", "of trained tokens whose ratio was clipped"),
    "train/ratio": Metric(
        "1", "mean importance ratio, policy / old policy (the kernel's anchor), over trained tokens"
    ),
    "train/old_kl": Metric("nats/token", "KL(old policy || policy), the same two (k3 estimator)"),
    "train/policy_loss": Metric("nats", "the clipped policy-gradient term alone"),
    "train/nll": Metric("nats/token", "negative log-likelihood, with the sft loss"),
    "train/kl": Metric("nats/token", "KL of the policy to the reference (k3 estimator)"),
    "train/entropy": Metric("nats/token", "entropy of the distribution sampled from"),
    "train/logprob_gap": Metric(
        "nats", "mean absolute difference of engine and trainer log-probs of sampled tokens, before the update"
    ),
    "train/advantage_zero": Metric("share", "of episodes in groups whose rewards are all equal: they teach nothing"),
    "train/tokens": Metric("tokens", "trained in the step (loss mask)"),
    "train/fed_tokens": Metric("tokens", "in the training rows, padding excluded"),
    "train/microbatches": Metric("count", "per optimizer step and data-parallel rank"),
    "rollout/episodes": Metric("count", "collected in the step, aborted ones included"),
    "rollout/turns": Metric("per episode", "responses of the policy"),
    "rollout/searches": Metric("per episode", "searches"),
    "rollout/response_tokens": Metric("tokens/episode", "sampled by the policy"),
    "rollout/observation_tokens": Metric("tokens/episode", "fed from the environment"),
    "rollout/observations_cut": Metric("per episode", "observations cut to rollout.max_observation_tokens"),
    "rollout/truncated_max_turns": Metric("share", "of episodes cut by rollout.max_turns"),
    "rollout/truncated_max_tokens": Metric("share", "of episodes cut by a token budget"),
    "rollout/aborted": Metric("share", "of episodes lost to infrastructure; out of loss and baseline"),
    "search/searches": Metric("count", "answered in the step, those of aborted episodes included"),
    "search/hit_rate": Metric("share", "of searches that the client's cache answered; only where there is one"),
    "search/empty_rate": Metric("share", "of searches that found nothing"),
    "search/duplicate_rate": Metric("share", "of searches that their episode had made before"),
    "search/gold_in_top_k": Metric("share", "of searches that found a passage with a gold answer"),
    "data/prompts_dropped": Metric("count", "prompts over data.max_prompt_tokens, of the training split"),
    "data/epoch": Metric("epochs", "passes over the training tasks so far"),
    "speed/tokens_per_s": Metric("tokens/s", "train/fed_tokens by the seconds of the whole step"),
    **{f"time/{phase}_s": Metric("s", _PHASE_MEANING[phase]) for phase in PHASES},
    "time/step_s": Metric("s", "the whole step"),
    "time/search_s": Metric("s", "of the rollout, with at least one search under way"),
    "time/search_wait_s": Metric("s", "per search, until its episode could go on"),
    "time/search_share": Metric("share", "of the whole step, with at least one search under way"),
    **{f"memory/{phase}_gib": Metric("GiB", f"peak, {_PHASE_MEANING[phase]}") for phase in PHASES},
    "eval/exact_match": Metric("share", "of the evaluated questions, failed ones left out"),
    "eval/exact_match_low": Metric("share", "lower end of its 95% interval"),
    "eval/exact_match_high": Metric("share", "upper end of its 95% interval"),
    "eval/f1": Metric("share", "mean token F1"),
    "eval/f1_low": Metric("share", "lower end of its 95% interval"),
    "eval/f1_high": Metric("share", "upper end of its 95% interval"),
    "eval/reward": Metric("reward", "mean return"),
    "eval/reward_low": Metric("reward", "lower end of its 95% interval"),
    "eval/reward_high": Metric("reward", "upper end of its 95% interval"),
    "eval/searches": Metric("per question", "searches"),
    "eval/turns": Metric("per question", "responses of the policy"),
    "eval/response_tokens": Metric("tokens/question", "sampled by the policy"),
    "eval/questions": Metric("count", "questions with an attempt that did not fail"),
    "eval/attempts": Metric("count", "attempts at them (evaluation.samples_per_prompt each), failed ones left out"),
    "eval/failed": Metric("count", "attempts lost to infrastructure: reported apart, never scored 0"),
}


def metrics_table() -> str:
    """The table above in Markdown, for the docs."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"
