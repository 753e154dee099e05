"""Rows that are scored before their step: each once, and to the same bits as at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms import early_scores
from rlflow.algorithms.early_scores import EarlyScores
from rlflow.batching import make_batch
from rlflow.trainer import Trainer
from rlflow.types import Batch, Group, Segment, StopReason, Task, Trajectory
from tests.reference import ORACLE


def group(name: str, lengths: Sequence[Sequence[int]], first: int = 3) -> Group:
    """Attempts with segments of these lengths, no two alike."""
    attempts = []
    for number, parts in enumerate(lengths):
        segments = []
        for part, length in enumerate(parts):
            tokens = torch.arange(length) % 7 + first + number + 11 * part
            mask = torch.arange(length) > 1
            segments.append(Segment(tokens, mask, -torch.ones(length), torch.where(mask, 0, -1)))
        attempts.append(
            Trajectory(
                name,
                f"0:{name}",
                segments,
                [],
                1.0,
                StopReason.TERMINATED,
                attempt=number,
                id=f"0:{name}/{number}",
            )
        )
    return Group(f"0:{name}", Task(name, "?"), attempts)


def filled(early: EarlyScores, groups: Sequence[Group]) -> Batch:
    usable = [one for each in groups for one in each.usable]
    return early.fill(
        make_batch(usable), usable, [each.task for each in groups for _ in each.usable]
    )


GROUPS = [
    group("a", [[5], [9, 4]]),
    group("b", [[3], [12]], first=20),
    group("c", [[7], [6]], first=40),
]


def test_each_row_is_scored_once_in_whatever_order_groups_end() -> None:
    seen: Counter[tuple[int, ...]] = Counter()

    def sums(batch: Batch, tasks: Sequence[Task]) -> Batch:
        seen.update(
            tuple(row[:length].tolist()) for row, length in zip(batch.tokens, batch.lengths)
        )
        return batch.replace(reference_logprobs=batch.tokens.cumsum(1).float() / 8)

    early = EarlyScores({"reference": sums})
    early.take(GROUPS[2])
    early.take(GROUPS[0])
    found = filled(early, GROUPS)  # of which b ended last
    expected = make_batch([one for each in GROUPS for one in each.trajectories])
    inside = torch.arange(expected.tokens.shape[1]) < expected.lengths[:, None]
    assert torch.equal(
        found.reference_logprobs, (expected.tokens.cumsum(1).float() / 8).masked_fill(~inside, 0)
    )
    assert set(seen.values()) == {1} and len(seen) == len(expected) == early.rows["reference"] == 7


def test_an_attempt_that_was_sampled_again_under_its_id_is_asked_about_anew() -> None:
    early = EarlyScores(
        {"reference": lambda batch, tasks: batch.replace(reference_logprobs=batch.tokens.float())}
    )
    early.take(group("a", [[5], [6]]))
    again = group("a", [[5], [6]], first=30)
    found = filled(early, [again])
    assert torch.equal(
        found.reference_logprobs[0],
        again.trajectories[0].segments[0].tokens.float().new_tensor([30, 31, 32, 33, 34, 0]),
    )
    early.take(again)
    early.forget()  # another reference from now on
    filled(early, [again])
    assert early.rows["reference"] == 8


def test_rows_that_no_step_takes_are_dropped_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = EarlyScores(
        {"reference": lambda batch, tasks: batch.replace(reference_logprobs=batch.tokens.float())}
    )
    monkeypatch.setattr(early_scores, "MOST_BYTES", 40 * (8 + 4))  # 40 tokens with a score each
    for name in "abcd":
        early.take(group(name, [[18]]))
        filled(early, [group("taken", [[18]])])
    filled(early, [group("d", [[18]]), group("c", [[18]])])
    assert early.rows["reference"] == 8
    filled(early, [group("b", [[18]])])
    assert early.rows["reference"] == 9


def test_several_stages_fill_their_own_columns_of_the_same_rows() -> None:
    def letters(batch: Batch, tasks: Sequence[Task]) -> Batch:
        found = torch.tensor([float(ord(tasks[owner].id)) for owner in batch.trajectory])
        return batch.replace(teacher_logprobs=found[:, None].expand(batch.tokens.shape))

    early = EarlyScores({
        "reference": lambda batch, tasks: batch.replace(reference_logprobs=-batch.tokens.float()),
        "teacher": letters,
    })  # fmt: skip
    early.take(GROUPS[1])
    found = filled(early, GROUPS)
    assert early.rows == {"reference": 7, "teacher": 7}
    assert found.teacher_logprobs[:, 0].tolist() == [97.0, 97.0, 97.0, 98.0, 98.0, 99.0, 99.0]
    assert torch.equal(
        found.reference_logprobs[0, :5], -GROUPS[0].trajectories[0].segments[0].tokens.float()
    )


@pytest.mark.parametrize(
    "tokens_per_microbatch, exact", [(1, True), (4096, False)], ids=["a row each", "as they come"]
)
def test_a_trainer_says_the_same_of_rows_early_and_at_the_end(
    tokens_per_microbatch: int, exact: bool, tmp_path: Path
) -> None:
    """Bit for bit where a row is computed alone either way; to rounding where other rows stand beside it."""
    path = tiny_model(tmp_path / "qwen2", "qwen2")
    trainer = Trainer.from_pretrained(path, ORACLE, tokens_per_microbatch=tokens_per_microbatch)
    trainer.snapshot("reference")

    def scored(batch: Batch, tasks: Sequence[Task] = ()) -> Batch:
        return batch.replace(reference_logprobs=trainer.score(batch, model="reference")["logprobs"])

    early = EarlyScores({"reference": scored})
    for each in reversed(GROUPS):
        early.take(each)
    found = filled(early, GROUPS).reference_logprobs
    expected = scored(
        make_batch([one for each in GROUPS for one in each.trajectories])
    ).reference_logprobs
    assert torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-5)
    assert found.abs().sum() > 1
