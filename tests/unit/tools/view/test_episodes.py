"""What a record says of its episode."""

from __future__ import annotations

import pytest
from rlflow_tools.view.episodes import question_of


@pytest.mark.parametrize(
    ("prompt", "question", "told"),
    [
        ("Who?\nAnswer:", "Where was she born? ", "Where was she born?"), ("Numbers.\nWhat is 2 + 2?\n\n", "", "What is 2 + 2?"),
        ("You play NetHack.\nAction:\n", None, "train-3"), ("", None, "train-3"), (None, None, "train-3"),
        ([{"role": "system", "content": "Help."}, {"role": "user", "content": "Now?"}], None, "Now?"),
    ],
)  # fmt: skip
def test_a_group_is_titled_by_what_tells_it_from_others(
    prompt: object, question: str | None, told: str
) -> None:
    metadata = None if question is None else {"question": question}
    assert question_of({"task_id": "train-3", "prompt": prompt, "metadata": metadata}) == told
