"""A run's side of a swarm without a model: the letters task, what could be said to it, and a transport in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.sleeping import FakeEngine
from rlflow.environment import Environment
from rlflow.rollout import Response, Rollout, Tokenizer, Transcripts
from rlflow.types import Group, Task
from rlflow_environments.swarm.filter import Swarm
from rlflow_environments.swarm.messages import dump
from rlflow_environments.swarm.transport import ExperienceTransport
from tests.flow.letters import DEMAND, LETTERS, SPECIAL, Letters

WORDS = (*SPECIAL, *LETTERS, DEMAND, "|")


def letters_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """One token per letter, numbered as in `words`."""
    inner = Fast(models.BPE({word: number for number, word in enumerate(words)}, []))
    inner.decoder = decoders.Fuse()
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    )


def letters_rollout(
    environment: Environment | None = None, words: Sequence[str] = WORDS, **options: Any
) -> Rollout:
    """A rollout whose "model" says letters at random."""
    tokenizer = letters_tokenizer(words)
    values = {
        "samples_per_prompt": 2,
        "max_turns": 2,
        "max_response_tokens": 2,
        "max_total_tokens": 16,
        **options,
    }
    return Rollout(
        FakeEngine(tokenizer, vocab=len(words)), environment or Letters(), tokenizer, **values
    )


def said(task: str, *attempts: str) -> Transcripts:
    """Attempts at the task `train-ab`, each a letter per turn: `ab` is right, `ax` half right, `xx` wrong."""
    pair = tuple(task.rpartition("-")[2])
    turns = tuple(tuple(Response(letter, "stop") for letter in attempt) for attempt in attempts)
    return Transcripts(Task(task, f"{pair[0]}?", list(pair)), turns)


class Mailbox(ExperienceTransport):
    """Messages by hand."""

    max_bytes = 2**16

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent: list[bytes] = []
        self.incoming: list[bytes] = []

    def publish(self, messages: Sequence[bytes]) -> None:
        self.sent += messages

    def receive(self) -> list[bytes]:
        come, self.incoming = self.incoming, []
        return come


MAILBOX = {"name": "tests.unit.environments.swarm.peers:Mailbox"}


def member(
    rollout: Rollout, *incoming: Transcripts | bytes, peer: str = "me", **options: Any
) -> Swarm:
    """A filter of the swarm to which these have been sent, by the peer `you`."""
    swarm = Swarm(rollout, 0, MAILBOX, peer, **options)
    swarm._transport.incoming += [
        one if isinstance(one, bytes) else dump(one, "you") for one in incoming
    ]
    return swarm


def lied(transcript: Transcripts, **changes: Any) -> bytes:
    """A message with other values at the top level or in the task."""
    document = json.loads(dump(transcript, "liar"))
    document["task"] |= changes.pop("task", {})
    return json.dumps({**document, **changes}).encode()


def external(groups: list[Group]) -> list[Group]:
    return [
        group for group in groups if any(one.source == "external" for one in group.trajectories)
    ]
