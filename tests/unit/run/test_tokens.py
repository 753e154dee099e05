"""What a run keeps of single tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batching import make_batch
from rlflow.errors import CheckpointError
from rlflow.report.recorder import (
    Recorder,
    TokenTexts,
    mean_advantage,
    score_tokens,
    segment_tokens,
    whole_groups,
)
from rlflow.report.records import read_trajectories
from rlflow.report.tokens import FLOATS, read_tokens, write_tokens
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.types import Batch, Group, Segment, StopReason, Task, Trajectory, Turn, stamp
from tests.fixtures import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Places:
    """A trainer as far as `score_tokens` knows one: token t has log-prob -t and entropy t / 10."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def score(self, batch: Batch, want: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        self.rows.append(len(batch))
        places = torch.arange(batch.tokens.shape[1]).float().expand(batch.tokens.shape)
        return {"logprobs": -places, "entropy": places / 10}


def segment(tokens: list[int], mask: list[int], version: int = 3, known: bool = True) -> Segment:
    sampled = torch.tensor(mask, dtype=torch.bool)
    logprobs = torch.where(sampled, -0.25, 0.0) if known else None
    return Segment(torch.tensor(tokens), sampled, logprobs, torch.where(sampled, version, -1))


def trajectory(
    number: int, segments: list[Segment], stop: StopReason = StopReason.TERMINATED
) -> Trajectory:
    turns = [Turn(place, 1, len(one), 0.0, 0.1, "x") for place, one in enumerate(segments)]
    return Trajectory(
        "t", "g", segments, turns, float(number), stop, attempt=number, id=f"g/{number}"
    )


def groups() -> list[Group]:
    """An aborted attempt, one of two segments, one whose log-probs nobody knows; then a group of two."""
    first = [
        trajectory(0, [segment([5, 6], [0, 1])], StopReason.ABORTED),
        trajectory(
            1, [segment([7, 8, 9], [0, 1, 1]), segment([7, 1, 2, 3], [0, 0, 1, 1], version=4)]
        ),
        trajectory(2, [segment([7, 8], [0, 1], known=False)]),
    ]
    second = [
        trajectory(3, [segment([1, 2], [0, 1])]),
        trajectory(4, [segment([1, 2, 3], [0, 1, 0])]),
    ]
    stamp(first), stamp(second)
    return [Group("g", Task("t", "?"), first), Group("h", Task("u", "?"), second)]


def batch_of(parts: Sequence[Group]) -> Batch:
    batch = make_batch([one for group in parts for one in group.usable])
    return batch.replace(advantages=batch.loss_mask * torch.arange(1.0, len(batch) + 1)[:, None])


def test_a_step_is_read_as_it_was_known(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts, trainer = groups(), Places()
    recorder = Recorder(RunDirectory(tmp_path), tokenizer, episodes=3)
    recorder.observe(batch_of(parts), parts, trainer)  # type: ignore[arg-type]
    recorder.write(7, parts)
    assert trainer.rows == [3]  # the kept group's alone
    episodes = read_tokens(RunDirectory(tmp_path).tokens(7))
    assert list(episodes) == ["g/0", "g/1", "g/2"]
    first, second = episodes["g/1"].segments
    assert first.tokens.tolist() == [7, 8, 9] and first.sampled.tolist() == [False, True, True]
    assert first.trainer_logprobs.tolist() == [-1.0, -2.0] and first.logprobs.tolist() == [
        -0.25,
        -0.25,
    ]
    assert second.versions.tolist() == [4, 4] and second.entropy.tolist() == pytest.approx(
        [0.2, 0.3]
    )
    assert first.advantages.tolist() == [1.0, 1.0] and second.advantages.tolist() == [2.0, 2.0]
    assert episodes["g/1"].turns == [(0, 1, 3), (1, 1, 4)]
    aborted, unknown = episodes["g/0"].segments[0], episodes["g/2"].segments[0]
    assert np.isnan(aborted.advantages).all() and aborted.logprobs.tolist() == [-0.25]
    assert np.isnan(unknown.logprobs).all() and unknown.advantages.tolist() == [3.0]
    records = read_trajectories(RunDirectory(tmp_path).trajectories(7))
    assert [record["advantage"] for record in records] == [None, 1.5, 3.0]
    assert records[1]["group_mean"] == 1.5


def test_nothing_is_kept_where_nothing_is_wanted_and_text_where_nobody_observed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    parts, trainer = groups(), Places()
    none = Recorder(RunDirectory(tmp_path), tokenizer, episodes=0)
    none.observe(batch_of(parts), parts, trainer)  # type: ignore[arg-type]
    none.write(1, parts)
    assert trainer.rows == [] and list(tmp_path.iterdir()) == []
    Recorder(RunDirectory(tmp_path), tokenizer, episodes=9).write(1, parts)
    assert len(read_trajectories(RunDirectory(tmp_path).trajectories(1))) == 5
    assert not RunDirectory(tmp_path).tokens(1).exists()


def test_groups_are_kept_whole_and_spread() -> None:
    parts = [Group(str(place), Task("t", ""), [trajectory(0, [])] * 4) for place in range(6)]
    assert [[group.id for group in whole_groups(parts, count)] for count in (1, 4, 5, 12, 24, 99)] == [
        ["0"], ["0"], ["0", "3"], ["0", "2", "4"], list("012345"), list("012345"),
    ]  # fmt: skip
    assert whole_groups([], 3) == []
    uneven = [Group(str(size), Task("t", ""), [trajectory(0, [])] * size) for size in (1, 2, 1, 8)]
    assert sum(len(group.trajectories) for group in whole_groups(uneven, 9)) >= 9


def test_text_of_tokens_joins_to_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    for text in ("plain words", "größe 東京 😀<|im_end|>\n x", "\ufffd?", ""):
        ids = tokenizer.encode(text)
        said = texts.of(ids)
        assert len(said) == len(ids)
        assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=False)


def test_tokens_are_compact(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Of a sequence of which a sixth was sampled, at most 6 bytes per token."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(8):
        mask = torch.arange(600) % 6 == 5
        noise = torch.randn(600, generator=generator)
        one = Segment(
            torch.randint(3, 300, (600,), generator=generator),
            mask,
            noise,
            torch.where(mask, 1, -1),
        )
        columns: Any = dict.fromkeys(FLOATS, noise + 1e-06)
        rows.append((trajectory(number, [one]), [segment_tokens(one, columns, mask)]))
    write_tokens(tmp_path / "t.npz", rows, TokenTexts(tokenizer).of)
    assert (tmp_path / "t.npz").stat().st_size < 6 * 8 * 600


def test_a_damaged_file_is_told_or_reads_as_before(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, draw = tmp_path / "t.npz", random.Random(0)
    rows = [
        (one, [segment_tokens(own) for own in one.segments]) for one in groups()[0].trajectories
    ]
    write_tokens(path, rows, TokenTexts(tokenizer).of)
    content, names = path.read_bytes(), list(read_tokens(path))
    for place in draw.sample(range(len(content)), 200):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        for damaged in (bytes(changed), content[:place]):
            path.write_bytes(damaged)
            try:
                assert list(read_tokens(path)) == names  # of a date or a flag in the archive
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: damaged")


def test_the_mean_advantage_is_over_trained_tokens() -> None:
    one = segment([1, 2, 3], [0, 1, 1])
    trained = torch.tensor([False, True, False])
    columns = {"advantages": torch.tensor([0.0, 2.0, 8.0])}
    assert mean_advantage([segment_tokens(one, columns, trained)]) == 2.0
    assert mean_advantage([segment_tokens(one)]) is None and mean_advantage([]) is None


def test_rows_are_found_by_trajectory_not_by_place() -> None:
    parts = groups()
    owners = [one for group in parts for one in group.usable]
    found = score_tokens(batch_of(parts), owners, parts[1].trajectories, Places(), always=9)  # type: ignore[arg-type]
    assert {place: len(own) for place, own in found.items()} == {0: 1, 1: 1}
    assert found[1][0].advantages.tolist() == [5.0]


@pytest.mark.parametrize(
    "others, always, rows", [(60, 2, 4), (60, 4, 4), (10, 2, 2), (10, 3, 3), (10, 0, 1), (24, 0, 2)]
)
def test_beyond_what_was_asked_for_only_a_share_of_the_tokens_is_scored(
    others: int, always: int, rows: int
) -> None:
    """Four attempts of two tokens are kept, of a batch of 4 x `others` tokens more: a 24th of it all is free."""
    kept = [trajectory(number, [segment([1, 2], [0, 1])]) for number in range(4)]
    rest = trajectory(9, [segment([1] * 4 * others, [0] * (4 * others - 1) + [1])])
    parts, trainer = (
        [Group("g", Task("t", "?"), kept), Group("h", Task("u", "?"), [rest])],
        Places(),
    )
    found = score_tokens(batch_of(parts), [*kept, rest], kept, trainer, always)  # type: ignore[arg-type]
    assert sum(trainer.rows) == rows and len(found) == 4
    assert [bool(np.isfinite(found[place][0].entropy).all()) for place in range(4)] == [
        True
    ] * rows + [False] * (4 - rows)
    assert all(
        np.isfinite(own[0].advantages).all() and np.isfinite(own[0].logprobs).all()
        for own in found.values()
    )


def test_texts_come_back_wherever_their_tokens_stand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A token may be a part of a character in one place, of none in another, in any segment."""
    ids = [tokenizer.encode(text) for text in ("größe 😀", "東京 plain 😀😀", "", "words ü")]
    parts = [*ids, ids[1][:1], ids[0] + ids[1][:2]]
    segments = [segment(one, [1] * len(one)) for one in parts]
    rows = [(trajectory(place, [one]), [segment_tokens(one)]) for place, one in enumerate(segments)]
    texts = TokenTexts(tokenizer)
    write_tokens(tmp_path / "t.npz", rows, texts.of)
    found = read_tokens(tmp_path / "t.npz")
    assert [episode.texts for episode in found.values()] == [[texts.of(one)] for one in parts]
