"""What a run keeps of its tokens is the same whoever computed it: one process, or ranks that share the model or the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlflow.loop import train
from rlflow.report.tokens import EpisodeTokens, read_tokens
from rlflow.run.directory import RunDirectory
from tests.flow.letters import letters_config, write_letters_model

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = ("run.steps=1", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=3", "metrics.trajectories_per_step=4",
         "evaluation.every_steps=0", "evaluation.at_start=false", "evaluation.final_questions=1", "checkpoint.export=false",
         "metrics.picture=false", "checkpoint.every_steps=0", "run.deterministic=true")  # fmt: skip


def kept(model: Path, runs: Path, *layout: str) -> dict[str, EpisodeTokens]:
    train(letters_config(model, runs, *SMALL, *layout))
    return read_tokens(RunDirectory(runs / "letters").tokens(1))


def test_tokens_are_those_of_one_process_in_every_layout(tmp_path: Path) -> None:
    model = write_letters_model(tmp_path / "model")
    alone = kept(model, tmp_path / "one")
    assert len(alone) == 6
    layouts = {
        "tensor": ["trainer.tensor_parallel=2"],
        "pipeline": ["trainer.pipeline_parallel=2"],
        "data": [],
    }
    for name, layout in layouts.items():
        shared = kept(model, tmp_path / name, "cluster.ranks=2", *layout)
        assert list(shared) == list(alone)
        for key, episode in alone.items():
            for one, other in zip(episode.segments, shared[key].segments, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist()
                for column in ("trainer_logprobs", "entropy", "advantages"):
                    expected, found = getattr(one, column), getattr(other, column)
                    np.testing.assert_allclose(
                        found, expected, atol=1e-5, err_msg=f"{name} {column}"
                    )
