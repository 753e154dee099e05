"""Messages between peers: what `dump` wrote, and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rlflow.rollout import Response, Transcripts
from rlflow.types import Task
from rlflow_environments.swarm.messages import MessageError, digest, dump, load
from tests.unit.environments.swarm.peers import lied, said

PLAIN = said("train-ab", "ab", "cd")


@pytest.mark.parametrize(
    "task",
    [
        Task("a", "Who?", ["x", {"y": 1}], {"hops": 2}),
        Task("b", [{"role": "user", "content": "\ud800 half"}]),
        Task("c", "", None),
    ],
)
def test_a_transcript_comes_as_it_was_sent(task: Task) -> None:
    sent = Transcripts(
        task, ((Response("one\n", "eos"), Response("", "length")), (Response("€", "stop"),))
    )
    message = load(dump(sent, "peer-1"))
    assert message.transcript == sent and message.peer == "peer-1"


def test_what_json_cannot_say_stays_at_home() -> None:
    message = load(dump(Transcripts(Task("a", "Who?", {1, 2}), PLAIN.attempts), "p"))
    assert message.transcript.task == Task("a", "Who?")


def test_no_reward_is_sent() -> None:
    assert set(json.loads(dump(PLAIN, "p"))) == {"format", "peer", "task", "attempts"}


def test_the_digest_names_question_and_responses_whoever_sends_them_in_whatever_order() -> None:
    assert (
        load(dump(PLAIN, "p")).digest
        == load(dump(said("train-ab", "cd", "ab"), "q")).digest
        == digest(PLAIN)
    )
    assert (
        digest(PLAIN)
        != digest(said("train-ab", "ab", "ce"))
        != digest(said("train-cb", "ab", "ce"))
    )


DEEP = b'{"format": 1, "peer": "p", "task": ' + b"[" * 100_000
MISTAKES: dict[str, bytes] = {
    "nothing": b"", "no utf-8": b"\xff\xfe", "no json": b"{", "a list": b"[1]", "deep": DEEP,
    "a long number": b'{"format": ' + b"9" * 10_000 + b"}", "another format": lied(PLAIN, format=2),
    "pickle": b"\x80\x04cos\nsystem\n", "no peer": lied(PLAIN, peer=None), "a path as a peer": lied(PLAIN, peer="../x"),
    "no task": lied(PLAIN, task={"id": 3}), "a prompt of numbers": lied(PLAIN, task={"prompt": [1]}),
    "a message too much": lied(PLAIN, task={"prompt": [{"role": "user", "content": "x", "tool": "y"}]}),
    "metadata in a list": lied(PLAIN, task={"metadata": []}), "no attempts": lied(PLAIN, attempts=[]),
    "attempts by name": lied(PLAIN, attempts={"a": 1}), "a turn of text": lied(PLAIN, attempts=[["ab"]]),
    "no turns": lied(PLAIN, attempts=[[]]), "another end": lied(PLAIN, attempts=[[{"text": "a", "end": "exec"}]]),
    "an end in a list": lied(PLAIN, attempts=[[{"text": "a", "end": []}]]),
    "text in bytes": lied(PLAIN, attempts=[[{"text": 1, "end": "eos"}]]),
    "too many attempts": lied(PLAIN, attempts=[[{"text": "a", "end": "eos"}]] * 65),
    "too many turns": lied(PLAIN, attempts=[[{"text": "a", "end": "eos"}] * 257]),
}  # fmt: skip


@pytest.mark.parametrize("content", MISTAKES.values(), ids=MISTAKES)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(MessageError):
        load(content)


@pytest.mark.parametrize("shape", ["text", "turns", "metadata", "numbers"])
def test_reading_takes_time_linear_in_the_length(shape: str) -> None:
    def message(size: int) -> bytes:
        values: dict[str, Any] = {
            "text": {"attempts": [[{"text": "a\\" * size, "end": "eos"}]]},
            "turns": {"attempts": [[{"text": "a" * (size // 256), "end": "eos"}] * 256]},
            "metadata": {"task": {"metadata": {str(number): "x" for number in range(size // 8)}}},
            "numbers": {"task": {"answer": [10**300] * (size // 256)}},
        }
        return lied(PLAIN, **values[shape])

    def seconds(content: bytes) -> float:
        found = []
        for _ in range(3):
            began = time.process_time()
            load(content)
            found.append(time.process_time() - began)
        return min(found)

    small, large = message(2**15), message(2**19)  # 16 times as long: quadratic would be 256 times
    assert seconds(large) < 80 * seconds(small) + 0.02
