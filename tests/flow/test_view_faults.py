"""Three faults, each planted in a run of its own, are found by the page and by the comparison; a sound run has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rlflow_tools.view.comparison import compare, comparison_text
from rlflow_tools.view.page import write_page
from rlflow_tools.view.recorded import RunFiles

from rlflow.environment import Environment
from rlflow.loop import train
from rlflow.report.metrics import Metric
from rlflow.report.tokens import read_tokens
from rlflow.rollout import Rollout
from rlflow.types import Episode, Step, Task
from tests.flow.letters import DEMAND, LETTERS, letters_config
from tests.reference import ORACLE

SMALL = ("run.steps=5", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "metrics.trajectories_per_step=16",
         "evaluation.every_steps=0", "checkpoint.export=false", f"trainer.backend={ORACLE}", "metrics.picture=false",
         "checkpoint.every_steps=0")  # fmt: skip
ANSWER = "fade"


class Notes(Environment):
    """Shows a note after any response and ends after the second. The note holds the answer, and only then there is a reward."""

    stop = (*LETTERS, DEMAND, "|")
    metrics = {"exact_match": Metric("share", "of tasks", score=True)}
    note = f"|{ANSWER}{DEMAND}"

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{letter}", f"{letter}?", [ANSWER]) for letter in LETTERS]

    def step(self, episode: Episode, response: str) -> Step:
        if episode.turns < 2:
            return Step(self.note, metrics={"exact_match": 0.0})
        right = float(response in "abc?")  # some attempts win, so that there is something to learn
        return Step(reward=right, terminated=True, metrics={"exact_match": right})


class IgnoresTheEvidence(Notes):
    """Rewards the same responses, though the note says nothing."""

    note = f"|bead{DEMAND}"


class NeverStops(Notes):
    """Waits for a string that no token completes."""

    stop = ("</never>",)


def run_of(
    model: Path, runs: Path, environment: type[Environment], name: str, *overrides: str
) -> RunFiles:
    torch.manual_seed(0)
    named = f"environment={{name: '{Path(__file__).resolve()}:{environment.__name__}'}}"
    train(letters_config(model, runs, *SMALL, named, f"run.name={name}", *overrides))
    return RunFiles.open(runs / name)


@pytest.fixture(scope="module")
def sound(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return run_of(model, tmp_path_factory.mktemp("runs"), Notes, "sound")


@pytest.fixture
def stale_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weight syncs that reach no engine, and that nobody notices."""

    def load(rollout: Rollout, weights: object, version: int, probe: object = None) -> None:
        rollout.version = rollout.engines[0]._scheduler.runner.version = version

    with monkeypatch.context() as patch:
        patch.setattr(Rollout, "load_weights", load)
        yield


def check_found(sound: RunFiles, faulty: RunFiles, fault: str, tmp_path: Path) -> None:
    _, found = write_page(faulty, tmp_path / "view.html")
    assert [finding.name for finding in found][:1] == [fault]
    assert fault in (tmp_path / "view.html").read_text().split("<form")[0]  # above all controls
    text = comparison_text(compare([sound, faulty]))
    assert text.startswith(f"! {faulty.name}: {fault}") and f"! {sound.name}:" not in text


def test_a_sound_run_has_no_findings_and_all_of_its_tokens(sound: RunFiles, tmp_path: Path) -> None:
    content, found = write_page(sound, tmp_path / "view.html")
    assert found == [] and "without tokens" not in content.holds
    for step in range(1, 6):
        episodes = read_tokens(sound.tokens[step])
        assert len(episodes) == 16
        for episode in episodes.values():
            for segment in episode.segments:
                assert set(segment.versions.tolist()) == {step - 1}
                assert abs(segment.logprobs - segment.trainer_logprobs).max() < 1e-5


def test_a_reward_that_ignores_the_evidence_is_found(
    model: Path, sound: RunFiles, tmp_path: Path
) -> None:
    faulty = run_of(model, tmp_path, IgnoresTheEvidence, "ignores")
    check_found(sound, faulty, "rewarded without evidence", tmp_path)


def test_a_stop_string_that_never_matches_is_found(
    model: Path, sound: RunFiles, tmp_path: Path
) -> None:
    faulty = run_of(
        model, tmp_path, NeverStops, "endless", "trainer.lr=1e-6"
    )  # before it learns the end token
    check_found(sound, faulty, "responses never stop", tmp_path)


def test_an_engine_with_old_weights_is_found(
    model: Path, sound: RunFiles, tmp_path: Path, stale_engine: None
) -> None:
    faulty = run_of(model, tmp_path, Notes, "stale")
    check_found(sound, faulty, "engine and trainer disagree", tmp_path)
