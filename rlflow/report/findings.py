"""What is wrong with a run, in sentences: what its metrics said while it went on, and what its episodes say besides: rewards
without evidence, responses that never stop, tokens of old weights."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlflow.report.recorded import Record, RunFiles
from rlflow.report.records import answers_of, text_of
from rlflow.report.warnings import NEVER_STOPPING, Fault, faults_of

RECENT = 3
"""Of the training steps and of the evaluations, the last so many are read."""
LEAST = 5
"""Episodes below which no share is worth a sentence."""
UNPROVEN_SHARE, CUT_SHARE = 0.2, 0.5
_WORD = re.compile(r"\w+")


def findings(run: RunFiles) -> list[Fault]:
    """What the run was warned of, and what its last episodes show that it was not; nothing where nothing shows."""
    episodes = []
    for kind, steps in (("train", run.training), ("eval", run.evaluations)):
        for step in sorted(steps)[-RECENT:]:
            episodes += [record for record in run.records(kind, step) if record.get("stop") != "aborted"]
    limit = (run.config.get("rollout") or {}).get("max_response_tokens")
    seen = [stale(run), never_stopping(episodes, limit if isinstance(limit, int) else None), unproven(episodes)]
    found = {fault.name: fault for fault in faults_of(run.metrics, run.registered)}
    for fault in seen:
        if fault is not None:
            found.setdefault(fault.name, fault)
    return list(found.values())


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
    return Fault(NEVER_STOPPING, f"{text}.")


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
    return bool(long) and not any(gold in words(text_of(record.get("prompt", ""))) for gold in long)


def evidence(record: Record) -> bool:
    """Whether an observation of the episode holds an answer, as whole words."""
    golds = [words(gold) for gold in answers_of(record)]
    shown = [words(text_of(turn.get("observation", ""))) for turn in record["turns"]]
    return any(len(gold) > 2 and gold in text for gold in golds for text in shown)


def words(text: str) -> str:
    """The words of a text in lower case, with a blank around each: `in` then finds whole words only."""
    return f" {' '.join(_WORD.findall(text.lower()))} "
