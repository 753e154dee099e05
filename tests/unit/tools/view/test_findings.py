"""What episodes say is wrong with a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlflow_tools.view.findings import evidence, findings, never_stopping, provable, words
from rlflow_tools.view.recorded import RunFiles

from rlflow.rollout import Tokenizer
from rlflow.types import StopReason
from tests.unit.tools.view.crafted import (
    GUESSED,
    SEARCHED,
    attempt,
    group_of,
    small_run,
    task,
    trained,
    write_frame,
    write_step,
)


def test_a_healthy_run_has_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert findings(RunFiles.open(small_run(tmp_path, tokenizer))) == []


UNSEEN = [
    ("<answer>Lima</answer>", "All cases passed.")
]  # behind the last response: nobody reads it


@pytest.mark.parametrize(
    "turns, found", [(SEARCHED, []), (GUESSED, ["rewarded without evidence"]), (UNSEEN, [])]
)
def test_rewards_without_the_answer_in_an_observation_are_found(
    tmp_path: Path, tokenizer: Tokenizer, turns: list[tuple[str, str]], found: list[str]
) -> None:
    write_frame(tmp_path, [trained(1)])
    groups = [
        group_of(of, [attempt(tokenizer, of, 0, turns)])
        for of in (task(f"t{number}") for number in range(6))
    ]
    write_step(tmp_path, tokenizer, 1, groups)
    assert [finding.name for finding in findings(RunFiles.open(tmp_path))] == found


def test_tokens_of_old_weights_are_found_by_their_versions(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_frame(tmp_path, [trained(9)])
    of = task("t")
    for version, found in ((8, []), (7, []), (2, ["old weights"])):
        write_step(
            tmp_path,
            tokenizer,
            9,
            [group_of(of, [attempt(tokenizer, of, 0, SEARCHED, version=version)])],
        )
        assert [finding.name for finding in findings(RunFiles.open(tmp_path))] == found


def test_runs_that_may_sample_ahead_and_episodes_from_elsewhere_are_none_of_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    of = task("t")
    old = attempt(tokenizer, of, 0, SEARCHED, version=5)
    for staleness, source, found in (
        (3, "local", []),
        (2, "local", ["old weights"]),
        (0, "replay", []),
    ):
        write_frame(
            tmp_path, [trained(9)], f"rollout: {{asynchronous: {{max_staleness: {staleness}}}}}\n"
        )
        old.source = source
        write_step(tmp_path, tokenizer, 9, [group_of(of, [old])])
        assert [finding.name for finding in findings(RunFiles.open(tmp_path))] == found


def test_what_the_run_was_warned_of_is_a_finding_and_stands_once(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cut = {"rollout/turns": 1.0, "rollout/responses_cut": 1.0}
    write_frame(
        tmp_path, [{**trained(step, gap=1e-6 if step == 1 else 0.3), **cut} for step in range(1, 6)]
    )
    of = task("t")
    endless = [
        attempt(tokenizer, of, number, SEARCHED, version=4, stop=StopReason.MAX_TOKENS)
        for number in range(6)
    ]
    write_step(tmp_path, tokenizer, 5, [group_of(of, endless)])
    found = findings(RunFiles.open(tmp_path))
    assert [fault.title for fault in found] == [
        "responses never stop (step 3)",
        "engine and trainer disagree (step 4)",
    ]


def test_responses_that_never_stop_are_told_from_episodes_that_are_too_long(
    tokenizer: Tokenizer,
) -> None:
    record = {"stop": StopReason.MAX_TOKENS.value, "turns": [{"tokens": 40}]}
    ended = {"stop": "terminated", "turns": [{"tokens": 7}]}
    found = never_stopping([record] * 4 + [ended] * 2, 40)
    assert found is not None and "no stop string matched" in found.text and "4 of 6" in found.text
    long = never_stopping([record] * 6, 512)
    assert long is not None and "max_total_tokens" in long.text
    assert (
        never_stopping([record] * 4, 40) is None
        and never_stopping([record] * 2 + [ended] * 4, 40) is None
    )


def test_evidence_is_whole_words_and_short_answers_prove_nothing() -> None:
    def record(answer: str, shown: str, prompt: str = "Where?") -> dict[str, object]:
        return {
            "answer": [answer],
            "prompt": prompt,
            "turns": [{"observation": shown}],
            "task_id": "t",
        }

    assert evidence(record("New York", "born in new\nYORK, 1900")) and not evidence(
        record("York", "Yorkshire")
    )
    assert (
        provable(record("Vasmere", ""))
        and not provable(record("yes", ""))
        and not provable(record("Vasmere", "", "In Vasmere?"))
    )
    assert words("A,b") == " a b "
