"""What episodes say is wrong with a run, in sentences: rewards without evidence, responses that never stop, an engine that
samples from other weights than the trainer's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.run.trajectories import answers_of
from rlflow.view.recorded import Record, RunFiles

RECENT = 3
"""Of the training steps and of the evaluations, the last so many are read."""
LEAST = 5
"""Episodes below which no share is worth a sentence."""
UNPROVEN_SHARE, CUT_SHARE = 0.2, 0.5
GAP_NATS, GAP_GROWTH, GAP_NOTICED_NATS = 0.05, 10.0, 0.005
"""A mean gap between engine and trainer above the first is drift; so is one that grew by the second beyond the third. Half
precision explains some hundredths of a nat at the most."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Fault:
    """fault: a short name. text: a sentence, with figures and what to look at. step: where it shows, None for all of them."""

    fault: str
    text: str
    step: int | None = None


def findings(run: RunFiles) -> list[Fault]:
    """What is wrong with the run by its last episodes and by its metrics, the gravest first; nothing where nothing shows."""
    episodes = []
    for kind, steps in (("train", run.training), ("eval", run.evaluations)):
        for step in sorted(steps)[-RECENT:]:
            episodes += [(step, record) for record in run.records(kind, step) if record.get("stop") != "aborted"]
    records = [record for _, record in episodes]
    limit = (run.config.get("rollout") or {}).get("max_response_tokens")
    found = [
        drift(run.metrics),
        stale(run),
        never_stopping(records, limit if isinstance(limit, int) else None),
        unproven(records),
    ]
    return [finding for finding in found if finding is not None]


def drift(metrics: Sequence[Mapping[str, float]]) -> Fault | None:
    """Engine and trainer disagree on the tokens that were sampled, by `train/logprob_gap`."""
    gaps = [(int(record["step"]), record["train/logprob_gap"]) for record in metrics if "train/logprob_gap" in record]
    if not gaps:
        return None
    (first, start), (step, worst) = gaps[0], max(gaps, key=lambda gap: gap[1])
    grown = worst > GAP_NOTICED_NATS and worst > GAP_GROWTH * start
    if worst <= GAP_NATS and not grown:
        return None
    text = f"Engine and trainer disagree by {worst:.2g} nats per sampled token at step {step}"
    if step != first:
        text += f" ({start:.2g} at step {first})"
    text += (
        ": the engine may sample from other weights than the trainer's. Tint tokens by the gap; check the weight sync."
    )
    return Fault("engine and trainer disagree", text, step)


def stale(run: RunFiles) -> Fault | None:
    """Tokens of the run's own rollout that are sampled by weights further back than its configuration allows (`max_staleness` of
    runs that sample ahead), and two versions at the least."""
    rollout = run.config.get("rollout") or {}
    ahead = rollout.get("asynchronous") if isinstance(rollout, dict) else None
    allowed = ahead.get("max_staleness", 0) if isinstance(ahead, dict) else 0
    found: list[tuple[int, int]] = []
    for step in sorted(set(run.tokens) & set(run.training))[-RECENT:]:
        own = {
            str(record.get("id")) for record in run.records("train", step) if record.get("source", "local") == "local"
        }
        episodes = [episode for name, episode in run.tokens_of(step).items() if name in own]
        versions = [segment.versions[segment.versions >= 0] for episode in episodes for segment in episode.segments]
        found += [(step - 1 - int(known.min()), step) for known in versions if len(known)]
    behind, step = max(found, default=(0, 0))
    if behind <= max(1, allowed):
        return None
    text = f"Tokens of step {step} were sampled by weights {behind} updates behind the trainer's"
    return Fault("old weights", f"{text}, which shows in the gap too: check the weight sync.", step)


def never_stopping(records: Sequence[Record], most_tokens: int | None) -> Fault | None:
    """Most episodes end because a response reached the token limit: no stop string and no end token came."""
    if len(records) < LEAST:
        return None
    cut = [record for record in records if record.get("stop") == "max_tokens"]
    if len(cut) < CUT_SHARE * len(records):
        return None
    full = [record for record in cut if record["turns"] and record["turns"][-1]["tokens"] == most_tokens]
    text = f"{len(cut)} of {len(records)} episodes were cut at a token limit"
    if len(full) >= CUT_SHARE * len(cut):
        text += (
            f", {len(full)} of them in a response of exactly rollout.max_response_tokens = {most_tokens}: no stop string "
            "matched. Compare the environment's stop strings with the ends of the responses"
        )
    else:
        text += ": raise rollout.max_total_tokens or shorten what the environment shows"
    return Fault("responses never stop", f"{text}.")


def unproven(records: Sequence[Record]) -> Fault | None:
    """Rewards above 0 although no observation held the answer, in tasks whose environment shows something."""
    judged = [record for record in records if (record["reward"] or 0) > 0 and provable(record)]
    shows = any(turn.get("observation") for record in records for turn in record["turns"])
    without = [record for record in judged if not evidence(record)]
    if not shows or len(judged) < LEAST or len(without) < UNPROVEN_SHARE * len(judged):
        return None
    text = (
        f"{len(without)} of {len(judged)} rewarded episodes were never shown the answer in an observation: the reward ignores "
        "the evidence, or the policy answers from memory. Look at solved episodes without a highlight."
    )
    return Fault("rewarded without evidence", text)


def provable(record: Record) -> bool:
    """Whether the task has an answer of some length that its question does not hold itself."""
    golds = [words(gold) for gold in answers_of(record)]
    long = [gold for gold in golds if len(gold.strip()) > 3]
    return bool(long) and not any(gold in words(_text(record.get("prompt", ""))) for gold in long)


def evidence(record: Record) -> bool:
    """Whether an observation of the episode holds an answer, as whole words."""
    golds = [words(gold) for gold in answers_of(record)]
    shown = [words(_text(turn.get("observation", ""))) for turn in record["turns"]]
    return any(len(gold) > 2 and gold in text for gold in golds for text in shown)


def words(text: str) -> str:
    """The words of a text in lower case, with a blank around each: `in` then finds whole words only."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", "")) for message in value) if isinstance(value, list) else ""
