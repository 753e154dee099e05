"""Another model as the teacher, in the trainer's own processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlflow.algorithms.teachers.base import NAME, Classroom, Teacher
from rlflow.algorithms.teachers.vocabulary import check_tokenizers
from rlflow.errors import CheckpointError
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights
from rlflow.types import Batch
from rlflow.values import NonNegativeInt

logger = logging.getLogger(__name__)


class ModelTeacher(Teacher):
    """The frozen model of a HuggingFace directory, split over the trainer's ranks as the policy.

    It may be of any size and family; its dtype is `model.dtype`. With `trainer.offload_snapshots`
    it leaves the GPU between two steps. same_template: its chat template must be the policy's. A
    checkpoint holds its path and the content hash of its weights."""

    def __init__(
        self,
        path: str,
        top_k: NonNegativeInt = 0,
        prompt: str | None = None,
        same_template: bool = True,
    ) -> None:
        super().__init__(top_k, prompt)
        self._path, self._same_template = path, same_template
        WeightFiles(path)  # refuses half a model at once
        self._digest = ""

    def open(self, room: Classroom) -> None:
        super().open(room)
        check_tokenizers(
            room.tokenizer, self._path, "algorithm.teacher", self._same_template
        )
        self._digest = digest(iterate_weights(self._path))
        room.trainer.load_frozen(NAME, self._path)

    def score(self, batch: Batch) -> dict[str, Tensor]:
        return self.room.trainer.score(batch, NAME, top_k=self.top_k)

    def state_dict(self) -> dict[str, Any]:
        return {"path": self._path, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["digest"] != self._digest:
            raise CheckpointError(
                f"algorithm.teacher.path: {self._path} holds other weights than the teacher of the "
                f"checkpoint (which lay in {state['path']}): a resumed run keeps its teacher. Give "
                "the path of the old one, or begin another run."
            )
