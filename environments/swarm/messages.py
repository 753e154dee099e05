"""One transcript as a message between peers, in JSON: read with suspicion, in time linear in its
length.

{"format": 1, "peer": "a7", "task": {"id": "...", "prompt": "...", "answer": ..., "metadata": {}},
 "attempts": [[{"text": "...", "end": "eos"}, ...], ...]}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, get_args

from rlflow.errors import RLFlowError
from rlflow.rollout.codec import End, Response, Transcripts
from rlflow.types import Task

FORMAT = 1
PEER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_ATTEMPTS = 64
MOST_TURNS = 256  # of an attempt
_TASK_KEYS = ("id", "prompt", "answer", "metadata")


class MessageError(RLFlowError):
    """A message is not what `load` expects; it is counted and left aside."""


@dataclass(frozen=True)
class PeerMessage:
    """A transcript and the name under which a peer sent it. digest: of the question and the
    responses, whoever sent them."""

    peer: str
    transcript: Transcripts
    digest: str


def dump(transcript: Transcripts, peer: str) -> bytes:
    """The message. A task whose answer or metadata JSON cannot say goes without both: peers that
    have the task can use it."""
    task = {name: getattr(transcript.task, name) for name in _TASK_KEYS}
    try:
        json.dumps(task)
    except (TypeError, ValueError, RecursionError):
        task = {"id": task["id"], "prompt": task["prompt"]}
    attempts = [
        [dataclasses.asdict(response) for response in attempt] for attempt in transcript.attempts
    ]
    return json.dumps({"format": FORMAT, "peer": peer, "task": task, "attempts": attempts}).encode()


def load(message: bytes) -> PeerMessage:
    """The message that `dump` wrote. Raises MessageError for anything else; nothing of it is
    evaluated."""
    try:
        document = json.loads(message.decode())
    except (ValueError, RecursionError) as error:  # numbers of more than 4300 digits too
        raise MessageError(f"expected JSON in UTF-8: {type(error).__name__}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise MessageError(f"expected a message of format {FORMAT}")
    peer, attempts = document.get("peer"), document.get("attempts")
    _expect(isinstance(peer, str) and PEER_NAME.fullmatch(peer), "the peer's name")
    if not isinstance(attempts, list) or not 0 < len(attempts) <= MOST_ATTEMPTS:
        raise MessageError(f"expected 1 to {MOST_ATTEMPTS} attempts")
    transcript = Transcripts(
        _task(document.get("task")), tuple(_attempt(attempt) for attempt in attempts)
    )
    return PeerMessage(str(peer), transcript, digest(transcript))


def digest(transcript: Transcripts) -> str:
    """Names the question and the responses, for doubles to be known."""
    attempts = sorted([response.text for response in attempt] for attempt in transcript.attempts)
    # Half surrogates are escaped
    text = json.dumps([transcript.task.id, transcript.task.prompt, attempts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _task(value: Any) -> Task:
    _expect(isinstance(value, dict), "a task")
    prompt, metadata = value.get("prompt"), value.get("metadata", {})
    _expect(isinstance(value.get("id"), str), "a task's id")
    _expect(isinstance(prompt, str) or _conversation(prompt), "a prompt: text or messages")
    _expect(isinstance(metadata, dict), "metadata by name")
    return Task(value["id"], prompt, value.get("answer"), metadata)


def _conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(one, dict)
        and set(one) == {"role", "content"}
        and all(isinstance(text, str) for text in one.values())
        for one in prompt
    )


def _attempt(value: Any) -> tuple[Response, ...]:
    _expect(isinstance(value, list) and 0 < len(value) <= MOST_TURNS, f"1 to {MOST_TURNS} turns")
    for turn in value:
        _expect(isinstance(turn, dict) and isinstance(turn.get("text"), str), "a response's text")
        _expect(
            any(turn.get("end") == end for end in get_args(End)),
            f"its end, one of {', '.join(get_args(End))}",
        )
    return tuple(Response(turn["text"], turn["end"]) for turn in value)


def _expect(holds: object, what: str) -> None:
    if not holds:
        raise MessageError(f"expected {what}")
