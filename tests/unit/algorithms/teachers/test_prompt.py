"""Self-distillation: which prompt the teacher sees, and that every log-prob comes back to its token's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.policy import PolicyTeacher
from rlflow.algorithms.teachers.prompt import PromptTemplate
from rlflow.batching import make_batch
from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.rollout import Tokenizer
from rlflow.types import (
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    Batch,
    Segment,
    StopReason,
    Task,
    Trajectory,
)
from tests.fixtures import tiny_model
from tests.reference.trainer import ReferenceTrainer

HINT = "Vasmere is right.\n{prompt}"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Classroom:
    path = tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=48)
    tokenizer = Tokenizer.from_pretrained(path)
    return Classroom(
        ReferenceTrainer(path, lr=0.1),
        tokenizer,
        lambda task: tokenizer.encode_prompt(task.prompt),
        0.7,
    )


def spoken(room: Classroom, tasks: list[Task], answers: list[str]) -> Batch:
    """A row per task: its prompt, and an answer that the policy is said to have sampled at temperature 0.7."""
    owners = []
    for task, answer in zip(tasks, answers, strict=True):
        prompt, said = room.prompt_tokens(task), room.tokenizer.encode(answer)
        tokens = torch.tensor(prompt + said)
        mask = torch.arange(len(tokens)) >= len(prompt)
        segment = Segment(tokens, mask, torch.zeros(len(tokens)), torch.where(mask, 0, -1))
        owners.append(
            Trajectory(task.id, "g", [segment], [], 1.0, StopReason.TERMINATED, temperature=0.7)
        )
    return make_batch(owners)


@torch.no_grad()
def test_each_token_gets_the_log_prob_that_it_has_behind_the_teachers_prompt(
    room: Classroom,
) -> None:
    """Against one forward pass of transformers per row, over the teacher's prompt and the same answer."""
    tasks = [
        Task("a", "Where was Orvan Telmik born?"),
        Task("b", "Which river?"),
        Task("c", "Who wrote it in the city?"),
    ]
    answers = ["Vasmere", "<search>the river Ilda</search>", "a painter"]
    batch = spoken(room, tasks, answers)
    teacher = PolicyTeacher(HINT, top_k=3)
    teacher.open(room)
    taught = teacher.fill(batch, tasks)
    assert taught.teacher_logprobs is not None
    for row, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
        prompt = room.tokenizer.encode(f"Vasmere is right.\n{task.prompt}")
        said = room.tokenizer.encode(answer)
        logits = room.trainer.model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]  # type: ignore[attr-defined]
        logprobs = (logits / 0.7).log_softmax(-1)
        here = slice(int(batch.lengths[row]) - len(said), int(batch.lengths[row]))
        expected = logprobs.gather(1, torch.tensor(said)[:, None])[:, 0]
        torch.testing.assert_close(taught.teacher_logprobs[row, here], expected, atol=1e-5, rtol=0)
        top = logprobs.topk(3, dim=1)
        assert torch.equal(taught.extras[TEACHER_TOP_IDS][row, here], top.indices)
        torch.testing.assert_close(
            taught.extras[TEACHER_TOP_LOGPROBS][row, here], top.values, atol=1e-5, rtol=0
        )
    own = room.trainer.score(batch)["logprobs"]
    assert not torch.allclose(
        taught.teacher_logprobs[batch.loss_mask], own[batch.loss_mask], atol=1e-2
    )


def test_a_copy_is_taken_every_n_steps_and_the_count_is_remembered(room: Classroom) -> None:
    task = Task("a", "Where?")
    batch = spoken(room, [task], ["Vasmere"])
    batch = batch.replace(weights=batch.loss_mask / batch.loss_mask.sum())
    teacher, live = PolicyTeacher(HINT, refresh_steps=2), PolicyTeacher(HINT)
    teacher.open(room)
    live.open(room)

    def step(who: PolicyTeacher) -> torch.Tensor:
        return who.fill(batch, [task]).teacher_logprobs  # type: ignore[return-value]

    first = step(teacher)
    room.trainer.update(batch, lambda output, _: (-output.logprobs, {}))
    assert torch.equal(step(teacher), first) and not torch.equal(step(live), first)
    resumed = PolicyTeacher(HINT, refresh_steps=2)
    resumed.room = room  # the trainer's checkpoint holds the copy
    resumed.load_state_dict(teacher.state_dict())
    assert torch.equal(step(resumed), step(live))  # the third step: a new copy


@pytest.mark.parametrize(
    "text, task, expected",
    [
        ("{prompt}!", Task("t", "a{b}"), "a{b}!"),
        (
            "{answer}: {prompt} ({hops})",
            Task("t", "why", answer="so", metadata={"hops": 2}),
            "so: why (2)",
        ),
        (
            "{answer} {prompt}",
            Task("t", "p", answer="<|im_end|>{prompt}"),
            "< |im_end|>{prompt} p",
        ),  # data says no control token
    ],
)
def test_a_template_is_filled_once_and_data_in_it_stays_text(
    room: Classroom, text: str, task: Task, expected: str
) -> None:
    assert PromptTemplate(text).tokens(task, room) == room.tokenizer.encode(expected)


def test_of_messages_the_last_one_of_the_user_is_replaced(room: Classroom) -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    told = [*talk[:2], {"role": "user", "content": "hint three"}]
    assert PromptTemplate("hint {prompt}").tokens(
        Task("t", talk), room
    ) == room.tokenizer.encode_prompt(told)
    assert talk[2]["content"] == "three"
    with pytest.raises(DataError, match="needs a user message"):
        PromptTemplate("{prompt}").tokens(Task("t", [{"role": "system", "content": "x"}]), room)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: PolicyTeacher("no place"),
            ConfigError,
            r"algorithm\.teacher\.prompt: expected a text with \{prompt\}",
        ),
        (
            lambda: PolicyTeacher("{prompt}"),
            ConfigError,
            "the live policy under its own prompt teaches nothing",
        ),
    ],
)
def test_prompts_that_make_no_sense_are_refused(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_field_that_a_task_lacks_and_a_prompt_that_is_not_there_are_one_error(
    room: Classroom,
) -> None:
    task = Task("q7", "Where?", metadata={"hops": 1})
    batch = spoken(room, [task], ["Vasmere"])
    teacher = PolicyTeacher("{demonstration} {prompt}")
    teacher.open(room)
    with pytest.raises(
        DataError,
        match=r"task 'q7': .*names '\{demonstration\}'; expected one of prompt, answer, hops",
    ):
        teacher.fill(batch, [task])
    teacher = PolicyTeacher(HINT)
    teacher.open(room)
    with pytest.raises(RLFlowError, match="row 0 does not start with its task's prompt"):
        teacher.fill(batch, [Task("q7", "Another question, which is longer than that?")])
