"""Tokenizers are compared by what they hold: the same content elsewhere passes, any difference is one error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.frozen_model import ModelTeacher
from rlflow.algorithms.teachers.vocabulary import check_tokenizers
from rlflow.errors import CheckpointError, ConfigError, ModelError
from rlflow.rollout import Tokenizer
from tests.fixtures import tiny_model, tiny_tokenizer
from tests.reference.trainer import ReferenceTrainer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def changed(path: Path, out: Path, change: Callable[[Any], Any]) -> Path:
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(str(path))
    change(inner)
    inner.save_pretrained(str(out))
    return out


def test_the_same_content_under_another_name_passes(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "elsewhere")
    check_tokenizers(
        Tokenizer.from_pretrained(path), tmp_path / "elsewhere", "algorithm.teacher", template=True
    )


def test_every_difference_is_one_error_that_names_it(path: Path, tmp_path: Path) -> None:
    policy = Tokenizer.from_pretrained(path)
    longer = changed(path, tmp_path / "longer", lambda inner: inner.add_tokens(["<extra>"]))
    with pytest.raises(
        ConfigError, match=r"another vocabulary.*1 differ: '<extra>' is nothing here and \d+ there"
    ):
        check_tokenizers(policy, longer, "algorithm.teacher", template=True)
    other = tiny_tokenizer(tmp_path / "other", vocab_size=300)
    with pytest.raises(
        ConfigError, match=r"algorithm\.teacher: .*other has another vocabulary than the policy"
    ):
        check_tokenizers(policy, other, "algorithm.teacher", template=True)

    def speak_otherwise(inner: Any) -> None:
        inner.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

    template = changed(path, tmp_path / "template", speak_otherwise)
    with pytest.raises(
        ConfigError, match=r"another chat template.*algorithm\.teacher\.same_template=false"
    ):
        check_tokenizers(policy, template, "algorithm.teacher", template=True)
    check_tokenizers(policy, template, "algorithm.teacher", template=False)
    with pytest.raises(ModelError, match="no tokenizer"):
        check_tokenizers(policy, tmp_path, "algorithm.teacher", template=True)


def test_a_resumed_run_keeps_its_teacher(tmp_path: Path) -> None:
    """By the content of its weights: the same ones elsewhere are the same teacher."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    one, other = (
        tiny_model(tmp_path / "one", **sizes),
        tiny_model(tmp_path / "other", seed=1, **sizes),
    )
    shutil.copytree(one, tmp_path / "moved")
    tokenizer = Tokenizer.from_pretrained(one)

    def opened(path: Path) -> ModelTeacher:
        teacher = ModelTeacher(str(path))
        teacher.open(Classroom(ReferenceTrainer(one), tokenizer, lambda task: [], 1.0))
        return teacher

    state = opened(one).state_dict()
    assert state["path"] == str(one)
    opened(tmp_path / "moved").load_state_dict(state)
    with pytest.raises(
        CheckpointError, match=r"other holds other weights than the teacher of the checkpoint.*one"
    ):
        opened(other).load_state_dict(state)
    with pytest.raises(ModelError, match="no such model directory"):
        ModelTeacher(str(tmp_path / "nowhere"))
