"""What files hold in place of what a policy says: conversations and texts, token by token, to be
imitated. `rollout.engine: recorded` makes a run of them.

The tokens of a conversation are those that the rollout feeds and samples: an assistant's turn is
what the chat template puts behind its generation prompt, and begins with a token of its own. Where
a template shows earlier turns in another way later (it strips their thinking), the conversation
becomes several rows, in each of which the turns that are trained stand as the policy will see them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch

from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError, ModelError, RolloutError
from rlflow.rollout.engine import Completion, FixedEngine, Sampling, Sent
from rlflow.rollout.engine_facts import EngineFacts
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.players import Ended, Event, Player
from rlflow.rollout.rollout import Rollout
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.weight_sync import SyncReport, WeightProbe
from rlflow.types import Message, Segment, StopReason, Task, TaskRecording, Trajectory, Turn

logger = logging.getLogger(__name__)

TooLong = Literal["drop", "truncate"]
SHOWN_BAD_ROWS = 3
OPEN_MARK, CLOSE_MARK = "⟦", "⟧"
"""Around trained tokens, in a row for people."""


class RecordedFacts(EngineFacts):
    """Nothing is loaded, nothing sampled."""

    recorded = True
    memory_known = True


class RecordedEngine(FixedEngine):
    """In place of an engine: a run imitates what its environment's tasks hold (`Task.recording`).

    too_long: rows over rollout.max_total_tokens are left out, or cut there."""

    facts = RecordedFacts

    def __init__(self, too_long: TooLong = "drop") -> None:
        self.too_long = too_long

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        raise RolloutError("rollout.engine: 'recorded' samples nothing; name another engine.")


@dataclass(frozen=True)
class RecordedRow:
    """One training sequence. tokens: int32. spans: (start, stop) of what is trained."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...]

    @property
    def trained(self) -> int:
        """Tokens that are trained; nothing precedes the first of a row, so it never is."""
        return sum(stop - max(start, 1) for start, stop in self.spans)

    def cut(self, length: int) -> RecordedRow:
        """Its first tokens."""
        spans = [(start, min(stop, length)) for start, stop in self.spans if start < length]
        return RecordedRow(self.tokens[:length], tuple(spans))


class _RowUnderWay:
    """A row that grows piece by piece. text: of a conversation so far, as its template shows it."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []

    def add(self, tokens: Sequence[int], trained: int = 0) -> None:
        """Appends tokens, the first `trained` of them to be trained."""
        if trained:
            self.spans.append((len(self.tokens), len(self.tokens) + trained))
        self.tokens += tokens

    def whole(self) -> RecordedRow:
        return RecordedRow(np.array(self.tokens, dtype=np.int32), tuple(self.spans))


def conversation_rows(
    tokenizer: Tokenizer, messages: Sequence[Message], context: int = 0
) -> list[RecordedRow]:
    """The rows of a conversation, each assistant's turn from message `context` on trained once; but
    for one that begins it, which nobody asks the policy for.

    Raises RolloutError where the template refuses the messages, DataError where it does not show a
    turn behind its generation prompt, so that no mask would be exact."""
    rows: list[_RowUnderWay] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < max(1, context):
            continue
        before = tokenizer.render(messages[:place])
        after = tokenizer.render(messages[: place + 1], generation_prompt=False)
        if not after.startswith(before):
            raise DataError(
                f"message {place + 1}: the chat template does not show the assistant's turn behind "
                f"its generation prompt: expected {before[-60:]!r} in front of it, found "
                f"{after[max(0, len(before) - 60) :][:60]!r}"
            )
        if rows and before.startswith(rows[-1].text):
            rows[-1].add(tokenizer.encode_piece(before[len(rows[-1].text) :]))
        else:
            rows.append(_RowUnderWay())
            rows[-1].add(tokenizer.encode(before))
        said = tokenizer.encode_piece(after[len(before) :])
        rows[-1].add(said, trained=_turn_length(tokenizer, said))
        rows[-1].text = after
    return [row.whole() for row in rows]


def _turn_length(tokenizer: Tokenizer, said: Sequence[int]) -> int:
    """How many tokens of an assistant's turn are the policy's: through the one that ends it, where
    only blanks follow."""
    ends = tokenizer.special_ids.union(tokenizer.eos_ids)
    last = max((place for place, token in enumerate(said) if token in ends), default=-1)
    blank = not tokenizer.decode(said[last + 1 :]).strip()
    return last + 1 if last >= 0 and blank else len(said)


def text_rows(tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]]) -> list[RecordedRow]:
    """The row of texts, each with whether it is trained; the end of the last one is said too."""
    row = _RowUnderWay()
    for place, (text, trained) in enumerate(texts):
        encode = tokenizer.encode_piece if row.tokens else tokenizer.encode
        tokens = encode(text)
        closes = place == len(texts) - 1 and trained and tokens[-1:] != [*tokenizer.eos_ids[:1]]
        tokens = [*tokens, *tokenizer.eos_ids[:1]] if closes else tokens
        row.add(tokens, trained=len(tokens) if trained else 0)
    return [row.whole()]


def marked_text(tokenizer: Tokenizer, row: RecordedRow) -> str:
    """The row as text, special tokens included, what is trained between OPEN_MARK and CLOSE_MARK."""
    parts: list[str] = []
    place = 0
    for start, stop in row.spans:
        parts += [_text(tokenizer, row, place, start), OPEN_MARK]
        parts += [_text(tokenizer, row, start, stop), CLOSE_MARK]
        place = stop
    return "".join([*parts, _text(tokenizer, row, place, len(row.tokens))])


def _text(tokenizer: Tokenizer, row: RecordedRow, start: int, stop: int) -> str:
    return tokenizer.decode(row.tokens[start:stop].tolist(), skip_special_tokens=False)


class RecordedRollout(Rollout):
    """A rollout without an engine: every attempt at a task ends at once with its recording, of
    source `demonstration` and without log-probs.

    too_long: rows over `max_total_tokens` are left out, or cut there. notes: what was counted of
    each split; samples: a row of each, for people."""

    recorded = True

    def __init__(
        self, environment: Environment, tokenizer: Tokenizer, *, too_long: TooLong, **options: Any
    ) -> None:
        super().__init__([], environment, tokenizer, **options)
        self._too_long = too_long
        self._rows: dict[str, list[RecordedRow]] = {}  # by task id
        self._equipped: dict[str, Tokenizer] = {"[]": self.tokenizer}  # by their tools
        self.notes: dict[str, str] = {}
        self.samples: dict[str, str] = {}

    def fitting(self, split: str, tasks: Sequence[Task], max_prompt_tokens: int) -> list[Task]:
        """The tasks whose rows are trained. Raises DataError for rows that cannot be made into
        tokens, and where none is left."""
        counts: Counter[str] = Counter()
        known: set[bytes] = set()
        bad: list[str] = []
        kept: list[Task] = []
        for task in tasks:
            try:
                rows = self._encoded(task)
            except (DataError, ModelError, RolloutError) as problem:
                bad.append(f"{task.id}: {problem}".removesuffix("."))
                continue
            fitting = self._cut(rows, counts)
            if not any(row.trained for row in fitting):
                counts["too long" if len(fitting) < len(rows) else "untrained"] += 1
                continue
            digest = blake2b(b"".join(row.tokens.tobytes() for row in fitting), digest_size=16)
            counts["repeated"] += digest.digest() in known
            known.add(digest.digest())
            counts["forked"] += len(fitting) > 1
            counts["tokens"] += sum(len(row.tokens) for row in fitting)
            counts["trained"] += sum(row.trained for row in fitting)
            counts["longest"] = max(counts["longest"], *(len(row.tokens) for row in fitting))
            self._rows[task.id] = [row for row in fitting if row.trained]
            kept.append(task)
        if bad:
            shown = "; ".join(bad[:SHOWN_BAD_ROWS])
            more = f"; and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
            raise DataError(
                f"split '{split}': {len(bad)} of {len(tasks)} rows are not what the chat template "
                f"takes: {shown}{more}. Fix or remove them."
            )
        self._note(split, kept, counts)
        if not kept:
            raise DataError(
                f"split '{split}': no row is left to train: {self.notes[split]}. Raise "
                "rollout.max_total_tokens, set rollout.engine.too_long=truncate, or mend the rows."
            )
        return kept

    def _note(self, split: str, kept: Sequence[Task], counts: Counter[str]) -> None:
        limit = self.max_total_tokens
        others = {
            "too long": f"longer than {limit:,} tokens and left out (rollout.max_total_tokens, "
            "rollout.engine.too_long)",
            "cut": f"longer than {limit:,} tokens and cut there (rollout.max_total_tokens)",
            "untrained": "with nothing to train, left out",
            "repeated": "the same as an earlier one, kept",
            "forked": "of several sequences, as the chat template shows earlier turns in another "
            "way later",
        }
        told = [f"{counts[name]:,} {what}" for name, what in others.items() if counts[name]]
        rows = (
            f"{len(kept):,} rows of {counts['tokens']:,} tokens, {counts['trained']:,} of them "
            f"trained, at most {counts['longest']:,} in a row"
        )
        self.notes[split] = "; ".join([rows, *told])
        level = logging.WARNING if told else logging.INFO
        logger.log(level, "split '%s': %s", split, self.notes[split])
        if kept:
            first = self._rows[kept[0].id][0]
            self.samples[split] = marked_text(self.tokenizer, first)

    def _cut(self, rows: Sequence[RecordedRow], counts: Counter[str]) -> list[RecordedRow]:
        """The rows that fit, or as much of them as fits."""
        limit = self.max_total_tokens
        long = sum(len(row.tokens) > limit for row in rows)
        if self._too_long == "drop":
            # The whole conversation, as a part of its turns is another one
            return [] if long else list(rows)
        counts["cut"] += long > 0
        return [row.cut(limit) for row in rows]

    def _encoded(self, task: Task) -> list[RecordedRow]:
        recording = task.recording
        if recording is None:
            raise ConfigError(
                f"rollout.engine: 'recorded' imitates what tasks hold, but task '{task.id}' of "
                f"{type(self.environment).__name__} has no recording; name another engine."
            )
        chat = self._limits.chat_template and len(recording.texts) == 2
        if recording.texts and not chat:
            return text_rows(self.tokenizer, recording.texts)
        if chat:
            (prompt, _), (completion, _) = recording.texts
            messages = [_message("user", prompt), _message("assistant", completion)]
            return conversation_rows(self.tokenizer, messages)
        tokenizer = self._with_tools(recording)
        return conversation_rows(tokenizer, recording.messages, recording.context)

    def _with_tools(self, recording: TaskRecording) -> Tokenizer:
        tools = json.dumps(list(recording.tools))
        if tools not in self._equipped:
            self._equipped[tools] = self.tokenizer.with_tools(recording.tools)
        return self._equipped[tools]

    def prompt_tokens(self, task: Task) -> list[int]:
        """The ids in front of what is trained first."""
        first = self._rows[task.id][0]
        return first.tokens[: first.spans[0][0]].tolist()

    def player(self, wake: Callable[[], object] = lambda: None) -> Player:
        player = RecordedPlayer(self._trajectory)
        self._players.add(player)
        return player

    def _trajectory(self, attempt: Attempt) -> Trajectory:
        rows = self._rows[attempt.task.id]
        turns = [turn for number, row in enumerate(rows) for turn in self._turns(number, row)]
        return Trajectory(
            task_id=attempt.task.id,
            group_id=attempt.group_id,
            segments=[_segment(row) for row in rows],
            turns=turns,
            reward=0.0,
            stop=StopReason.TERMINATED,
            metrics={"response_tokens": float(sum(row.trained for row in rows))},
            source="demonstration",
            attempt=attempt.number,
            id=attempt.id,
        )

    def _turns(self, number: int, row: RecordedRow) -> Iterable[Turn]:
        ends = [*(start for start, _ in row.spans[1:]), len(row.tokens)]
        for (start, stop), end in zip(row.spans, ends, strict=True):
            response = self.tokenizer.decode(row.tokens[start:stop].tolist())
            observation = _text(self.tokenizer, row, stop, end)
            yield Turn(number, start, stop, 0.0, 0.0, response, observation)

    def load_weights(
        self, weights: Iterable[Sent], version: int, probe: WeightProbe | None = None
    ) -> None:
        """Notes the version: nothing is sampled from the weights, and none are taken."""
        self.synced = SyncReport()
        self.version = version


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _segment(row: RecordedRow) -> Segment:
    mask = torch.zeros(len(row.tokens), dtype=torch.bool)
    for start, stop in row.spans:
        mask[max(start, 1) : stop] = True
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    return Segment(tokens, mask, None, torch.full_like(tokens, -1))


class RecordedPlayer:
    """Ends every attempt as soon as it is started. trajectory: makes that of an attempt."""

    poll_s = 0.25

    def __init__(self, trajectory: Callable[[Attempt], Trajectory]) -> None:
        self._trajectory = trajectory
        self._ended: list[Ended] = []

    def start(self, attempts: Sequence[Attempt]) -> None:
        self._ended += [Ended(one.request_id, self._trajectory(one)) for one in attempts]

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """The attempts that were started since the last call."""
        events: list[Event] = [*self._ended]
        self._ended.clear()
        return events

    def cancel(self, request_ids: Iterable[str]) -> None:
        cancelled = set(request_ids)
        self._ended = [one for one in self._ended if one.request_id not in cancelled]

    def close(self) -> None:
        self._ended.clear()
