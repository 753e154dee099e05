"""Another model as the teacher, in the trainer's own processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlflow.algorithms.teachers.base import NAME, Teacher
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.vocabulary import check_tokenizers
from rlflow.errors import CheckpointError
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights
from rlflow.types import Batch
from rlflow.values import NonNegativeInt


@dataclass
class ModelTeacher(Teacher):
    """The frozen model of a HuggingFace directory, split over the trainer's ranks as the policy.

    It may be of any size and family; its dtype is `model.dtype`. With `trainer.offload_snapshots`
    it leaves the GPU between two steps. same_template: its chat template must be the policy's. A
    checkpoint holds its path and the content hash of its weights."""

    path: str
    top_k: NonNegativeInt = 0
    prompt: str | None = None
    same_template: bool = True
    _digest = ""

    def __post_init__(self) -> None:
        super().__init__(self.top_k, self.prompt)
        WeightFiles(self.path)  # refuses half a model at once

    def open(self, room: Classroom) -> None:
        super().open(room)
        check_tokenizers(room.tokenizer, self.path, "algorithm.teacher", self.same_template)
        self._digest = digest(iterate_weights(self.path))
        room.trainer.load_frozen(NAME, self.path)

    def score(self, batch: Batch) -> dict[str, Tensor]:
        return self.room.trainer.score(batch, NAME, top_k=self.top_k)

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["digest"] != self._digest:
            raise CheckpointError(
                f"algorithm.teacher.path: {self.path} holds other weights than the teacher of the "
                f"checkpoint (which lay in {state['path']}): a resumed run keeps its teacher. Give "
                "the path of the old one, or begin another run."
            )
