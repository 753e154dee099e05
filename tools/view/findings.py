"""Faults that a recorded run shows: those that it was warned of, and those of its last episodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlflow.report.alarms import NEVER_STOPPING, Fault, Watch
from rlflow.report.records import text_of

from .episodes import answers_of
from .recorded import Record, RunFiles

RECENT = 3  # of the training steps and of the evaluations, the last so many are read
LEAST = 5  # episodes below which no share is worth a sentence
UNPROVEN_SHARE, CUT_SHARE = 0.2, 0.5
_WORD = re.compile(r"\w+")


def findings(run: RunFiles) -> list[Fault]:
    """The faults that the run was warned of, and those that its last episodes show."""
    episodes = []
    for kind, steps in (("train", run.training), ("eval", run.evaluations)):
        for step in sorted(steps)[-RECENT:]:
            episodes += [one for one in run.records(kind, step) if one.get("stop") != "aborted"]
    most = run.settings.get("rollout.max_response_tokens")
    found = {fault.name: fault for fault in Watch(run.registered).recall(run.metrics)}
    for fault in (stale(run), never_stopping(episodes, most), unproven(episodes)):
        if fault is not None:
            found.setdefault(fault.name, fault)
    return list(found.values())


def stale(run: RunFiles) -> Fault | None:
    """Tokens of the run's own rollout that older weights sampled than its configuration allows.

    Allowed is `max_staleness` of runs that sample ahead, and one version at the least."""
    allowed = run.settings.get("rollout.asynchronous.max_staleness") or 0
    lags: list[tuple[int, int]] = []
    for step in sorted(set(run.tokens) & set(run.training))[-RECENT:]:
        foreign = {
            str(one.get("id"))
            for one in run.records("train", step)
            if one.get("source", "local") != "local"
        }
        for name, episode in run.tokens_of(step).items():
            for segment in episode.segments if name not in foreign else ():
                known = segment.versions[segment.versions >= 0]
                if len(known):
                    lags.append((step - 1 - int(known.min()), step))
    behind, step = max(lags, default=(0, 0))
    if behind <= max(1, allowed):
        return None
    text = (
        f"Tokens of step {step} were sampled by weights {behind} updates behind the trainer's, "
        "which shows in the gap too: check the weight sync."
    )
    return Fault("old weights", text, step)


def never_stopping(records: Sequence[Record], most_tokens: int | None) -> Fault | None:
    """Most episodes end because a response reached the token limit."""
    cut = [record for record in records if record.get("stop") == "max_tokens"]
    if len(records) < LEAST or len(cut) < CUT_SHARE * len(records):
        return None
    full = [one for one in cut if one["turns"] and one["turns"][-1]["tokens"] == most_tokens]
    told = f"{len(cut)} of {len(records)} episodes were cut at a token limit"
    if len(full) < CUT_SHARE * len(cut):
        advice = ": raise rollout.max_total_tokens or shorten what the environment shows."
    else:
        advice = (
            f", {len(full)} of them in a response of exactly rollout.max_response_tokens = "
            f"{most_tokens}: no stop string matched. Compare the environment's stop strings with "
            "the ends of the responses."
        )
    return Fault(NEVER_STOPPING, told + advice)


def unproven(records: Sequence[Record]) -> Fault | None:
    """Rewards above 0 without the answer in any observation, where policies are shown something:
    what follows the last response is none of it."""
    judged = [one for one in records if (one["reward"] or 0) > 0 and provable(one)]
    shows = any(turn.get("observation") for record in records for turn in record["turns"][:-1])
    without = [record for record in judged if not evidence(record)]
    if not shows or len(judged) < LEAST or len(without) < UNPROVEN_SHARE * len(judged):
        return None
    text = (
        f"{len(without)} of {len(judged)} rewarded episodes were never shown the answer in an "
        "observation: the reward ignores the evidence, or the policy answers from memory. Look at "
        "solved episodes without a highlight."
    )
    return Fault("rewarded without evidence", text)


def provable(record: Record) -> bool:
    """Whether the task has an answer of some length that its question does not hold itself."""
    asked = words(text_of(record.get("prompt", "")))
    long = [gold for gold in map(words, answers_of(record)) if len(gold.strip()) > 3]
    return bool(long) and not any(gold in asked for gold in long)


def evidence(record: Record) -> bool:
    """Whether an observation of the episode holds an answer, as whole words."""
    golds = [gold for gold in map(words, answers_of(record)) if len(gold) > 2]
    shown = [words(text_of(turn.get("observation", ""))) for turn in record["turns"]]
    return any(gold in text for gold in golds for text in shown)


def words(text: str) -> str:
    """The words of a text in lower case, a blank around each: `in` then finds whole words only."""
    return f" {' '.join(_WORD.findall(text.lower()))} "
