"""Text from outside costs time in proportion to its length, whatever it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from rlflow.types import Task
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.threads import LONG_TEXT, beside_the_loop
from rlflow_environments.search.own_documents.documents import _FRONT_MATTER, split_sentences
from rlflow_environments.search.own_documents.writing import read_reply
from rlflow_environments.search.protocols import make_protocol
from rlflow_environments.search.protocols.text import neutralize_tags, parse_action
from rlflow_environments.search.rewards import Transcript, rule_scores, scoring
from rlflow_environments.search.rewards.judge import read_verdict

SIZE = 20_000  # a quadratic pattern takes seconds at this size
TEXTS: dict[str, Callable[[int], str]] = {
    "blanks behind a bracket": lambda n: "<" + " " * n,
    "newlines behind a slash": lambda n: "</" + "\n" * n,
    "blanks behind a name": lambda n: "<answer" + " " * n,
    "open answers": lambda n: "<answer>" * (n // 8),
    "open searches": lambda n: "<search>" * (n // 8) + "</answer>",
    "open calls": lambda n: "<tool_call>" * (n // 11),
    "open information": lambda n: "<information>" * (n // 13),
    "open bars": lambda n: "<|" * (n // 2) + "x" * n,
    "brackets": lambda n: "[" * n,
    "braces": lambda n: "{" * n,
    "digits": lambda n: "<answer>" + "1,000," * (n // 6) + "</answer>",
    "number words": lambda n: "<answer>" + "one hundred " + "hundred " * (n // 8) + "</answer>",
    "articles": lambda n: "<answer>" + "the " * (n // 4) + "</answer>",
    "initials": lambda n: "<answer>" + "A." * (n // 2) + "</answer>",
    "short sentences": lambda n: "A. " * n,
    "front matter": lambda n: "---\n" + "a" * n + "\n-- " * n,
    "verdicts": lambda n: '"judgement"' + " " * n,
}


def _read(protocol: str, text: str) -> object:
    made = make_protocol(protocol)
    return made.read(text, made.stop, False)


def _verdict(text: str) -> object:
    try:
        return read_verdict(text)
    except Exception as problem:  # noqa: BLE001 -- only the time counts
        return problem


READERS: dict[str, Callable[[str], object]] = {
    "neutralize_tags": neutralize_tags,
    "parse_action": parse_action,
    "extract_answer": scoring.extract_answer,
    "rule_scores": lambda text: rule_scores(Transcript(Task("t", "?", "gold"), (text,), (text,))),
    "read_reply": lambda text: list(read_reply(text)),
    "read_verdict": _verdict,
    "split_sentences": split_sentences,
    "front_matter": _FRONT_MATTER.match,
    **{
        name: lambda text, name=name: _read(name, text)
        for name in ("searchr1", "rlinf", "asearcher", "skyrl", "native")
    },
}


def _seconds(reader: Callable[[str], object], text: str) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        reader(text)
        best = min(best, time.thread_time() - start)
        if best < 0.01:
            break
    return best


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_text_takes_twice_the_time(reader: str) -> None:
    for name, make in TEXTS.items():
        once, twice = (_seconds(READERS[reader], make(size)) for size in (SIZE, 2 * SIZE))
        assert twice < max(0.03, 3.2 * once), (
            f"{reader} of {name}: {once:.3f} s, then {twice:.3f} s"
        )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>1</a><a>2</a>", ["1", "2"]),
        ("<a>1<a>2</a>3</a>", ["1<a>2"]),
        ("</a><a>1</a><a>", ["1"]),
        ("<a><a>", []),
        ("<a></a>", [""]),
    ],
)
def test_blocks_are_those_of_the_pattern(text: str, found: list[str]) -> None:
    assert blocks("a", text) == found


def test_a_call_of_a_thousand_brackets_is_a_wrong_call() -> None:
    protocol = make_protocol("native")
    assert protocol.read(f"<tool_call>{'[' * 100_000}</tool_call>", (), False).invalid


def test_long_work_leaves_the_event_loop_free() -> None:
    async def ticks_while(characters: int) -> int:
        ticks, working = 0, True

        async def tick() -> None:
            nonlocal ticks
            while working:
                ticks += 1
                await asyncio.sleep(0.001)

        other = asyncio.create_task(tick())
        await beside_the_loop(characters, lambda: time.sleep(0.05))
        working = False
        await other
        return ticks

    assert asyncio.run(ticks_while(LONG_TEXT + 1)) > 3
    assert asyncio.run(ticks_while(1)) <= 1  # a thread would cost more than it frees
