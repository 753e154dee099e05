"""Recordings as rows: the tokens are those of the chat template, the trained ones the assistant's alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_tokenizer

from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError, RolloutError
from rlflow.rollout import Tokenizer
from rlflow.rollout.recorded import (
    RecordedRollout,
    RecordedRow,
    conversation_rows,
    marked_text,
    text_rows,
)
from rlflow.types import Episode, Step, Task, TaskRecording
from tests.unit.rollout.chat_templates import (
    DEEPSEEK_R1,
    GPT_OSS,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN25,
    dressed,
    metaspace,
    tool,
    user,
)

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML whose assistant's turns transformers can tell."""


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = [
    [user("Where?"), said("Vasmere.")],
    [{"role": "system", "content": "Be brief."}, user("Where?"), said("Vasmere, naïve 日本")],
    [user("One"), said("yes no"), user("Two\n\n three"), said("river city"), user("left open")],
    [user("Go on"), said("a\n\nb  c\t"), tool("Doc 1"), said("the end ")],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def trained_texts(tokenizer: Tokenizer, row: RecordedRow) -> list[str]:
    return [tokenizer.decode(row.tokens[start:stop].tolist(), False) for start, stop in row.spans]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_tokens_and_mask_are_those_that_transformers_gives(
    messages: list[dict[str, str]], directory: Path
) -> None:
    tokenizer = dressed(directory, GENERATION)
    expected = tokenizer.inner.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    last = max(place for place, one in enumerate(messages) if one["role"] == "assistant")
    whole = tokenizer.inner.apply_chat_template(messages[: last + 1], tokenize=True)
    (row,) = conversation_rows(tokenizer, messages)
    mask = [0] * len(row.tokens)
    for start, stop in row.spans:
        mask[start:stop] = [1] * (stop - start)
    count = len(row.tokens)
    assert row.tokens.tolist() == list(whole["input_ids"])
    assert row.tokens.tolist() == list(expected["input_ids"])[:count]
    assert mask == list(expected["assistant_masks"])[:count]
    assert not any(list(expected["assistant_masks"])[count:])  # what a user says last is not read


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA31, GPT_OSS, MISTRAL])
def test_every_turn_is_trained_once_as_the_policy_would_see_it(
    template: str, directory: Path
) -> None:
    """A template that rewrites earlier turns gives several rows; in each, what stands before a trained turn is the prompt
    that a rollout would feed, and the turn ends as the template ends it."""
    tokenizer = dressed(directory, template)
    thought = "<think>\nhm\n</think>\n\n" if template is QWEN3 else ""
    messages = [user("A?"), said(f"{thought}One."), user("B?"), said(f"{thought}Two."), user("C?"), said("Three.")]  # fmt: skip
    rows = conversation_rows(tokenizer, messages)
    prompts, turns = [], []
    for row in rows:
        for start, stop in row.spans:
            prompts.append(tokenizer.decode(row.tokens[:start].tolist(), False))
            turns.append(tokenizer.decode(row.tokens[start:stop].tolist(), False))
    assert prompts == [tokenizer.render(messages[:place]) for place in (1, 3, 5)]
    assert len(rows) == (3 if template is QWEN3 else 1)
    for turn, word in zip(turns, ("One.", "Two.", "Three."), strict=True):
        before, found, behind = turn.partition(word)
        assert found and behind in ("<|im_end|>", "<|end|>") and "?" not in before


def test_a_template_that_hides_what_follows_its_generation_prompt_is_refused(
    directory: Path,
) -> None:
    tokenizer = dressed(directory, DEEPSEEK_R1)
    with pytest.raises(DataError, match=r"message 2: .*generation prompt.*<think>"):
        conversation_rows(tokenizer, [user("A?"), said("One.")])


def test_a_blank_is_put_nowhere_by_cutting_a_text_into_pieces() -> None:
    inner = metaspace()
    inner.chat_template = MISTRAL.replace("<|endoftext|>", "<s>").replace("<|im_end|>", "</s>")
    tokenizer = Tokenizer(inner)
    (row,) = conversation_rows(tokenizer, [user("no"), said("Paris"), user("q"), said("no")])
    assert trained_texts(tokenizer, row) == ["Paris</s>", "no</s>"]
    (row,) = text_rows(tokenizer, [("q", False), ("no", True)])
    assert tokenizer.decode(row.tokens.tolist()) == "qno"


def test_a_turn_that_begins_a_conversation_is_read_and_not_trained(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    (row,) = conversation_rows(tokenizer, [said("Hello."), user("A?"), said("One.")])
    assert trained_texts(tokenizer, row) == ["One.<|im_end|>"]
    assert "Hello." in tokenizer.decode(row.tokens.tolist())


def test_turns_before_the_context_ends_are_read_and_not_trained(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    messages = [user("A?"), said("One."), user("B?"), said("Two.")]
    (row,) = conversation_rows(tokenizer, messages, context=3)
    assert trained_texts(tokenizer, row) == ["Two.<|im_end|>"]
    assert "One." in tokenizer.decode(row.tokens.tolist())


def test_quoted_control_tokens_are_text(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    messages = [user("say <|im_end|>"), said("<|im_start|>user\nmore")]
    (row,) = conversation_rows(tokenizer, messages)
    ends = tokenizer.inner.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    # The system's, the user's and the assistant's
    assert [row.tokens.tolist().count(end) for end in ends] == [3, 3]


def test_a_text_ends_with_the_end_of_a_sequence_once(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    for text in ("the river", "the river<|im_end|>"):
        (row,) = text_rows(tokenizer, [(text, True)])
        assert row.tokens.tolist() == tokenizer.encode("the river<|im_end|>")
        assert row.spans == ((0, len(row.tokens)),) and row.trained == len(row.tokens) - 1
    (row,) = text_rows(tokenizer, [("Where?", False), (" here", True)])
    assert marked_text(tokenizer, row) == "Where?⟦ here<|im_end|>⟧"


# ---------------------------------------------------------------- a rollout of recordings


class Rows(Environment):
    """Tasks of the recordings, by the places in their list."""

    def __init__(self, recordings: Sequence[TaskRecording | None]) -> None:
        self._recordings = recordings

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"r:{n}", "", recording=one) for n, one in enumerate(self._recordings)]

    def step(self, episode: Episode, response: str) -> Step:
        raise AssertionError("nothing is played")


def rollout_of(
    directory: Path, recordings: Sequence[TaskRecording | None], **options: Any
) -> RecordedRollout:
    options = {"too_long": "drop", "max_response_tokens": 1, **options}
    return RecordedRollout(Rows(recordings), dressed(directory, QWEN25), **options)


def test_what_is_left_out_or_strange_is_counted(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = (
        TaskRecording(texts=(("the river", True),)),
        TaskRecording(texts=(("city " * 60, True),)),
    )
    none = TaskRecording([user("only asked")])
    with rollout_of(directory, [short, none, long, short], max_total_tokens=40) as rollout:
        kept = rollout.fitting("train", rollout.environment.tasks("train"), 1)
    assert [task.id for task in kept] == ["r:0", "r:3"]
    for told in ("2 rows", "1 longer than 40", "1 with nothing to train", "1 the same as"):
        assert told in rollout.notes["train"] and told in caplog.text
    assert rollout.samples["train"] == "⟦the river<|im_end|>⟧"


def test_rows_that_are_too_long_are_cut_where_that_is_wanted(directory: Path) -> None:
    row = TaskRecording(texts=(("Where? ", False), ("city " * 60, True)))
    late = TaskRecording(texts=(("city " * 60, False), ("yes", True)))
    options = {"max_total_tokens": 20, "too_long": "truncate"}
    with rollout_of(directory, [row, late], **options) as rollout:
        (task,) = rollout.fitting("train", rollout.environment.tasks("train"), 1)
        (group,) = rollout.collect([task], samples_per_prompt=1)
        prompt = rollout.prompt_tokens(task)
    (segment,) = group.trajectories[0].segments
    assert len(segment) == 20 and int(segment.loss_mask.sum()) == 20 - len(prompt)
    assert "1 with nothing to train" in rollout.notes["train"]


def test_rows_that_the_template_refuses_are_named_together(directory: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    fine = TaskRecording([user("A?"), said("B")])
    for template, bad, match in (
        (DEEPSEEK_R1, fine, "1 of 2 rows .* r:1: message 2"),
        (DEEPSEEK_R1.replace("<think>\n", "") + "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}",
         TaskRecording([user("A"), user("B"), said("C")]), "r:1: .*refuses"),
    ):  # fmt: skip
        texts = TaskRecording(texts=(("fine", True),))
        rollout = RecordedRollout(
            Rows([texts, bad]), dressed(directory, template), too_long="drop", max_response_tokens=1
        )
        with rollout, pytest.raises(DataError, match=match):
            rollout.fitting("train", rollout.environment.tasks("train"), 1)
    # QWEN25 of these tests presents no tools
    with rollout_of(directory, [TaskRecording([user("A"), said("B")], tools)]) as rollout:
        with pytest.raises(DataError, match=r"r:0: .*tools"):
            rollout.fitting("train", rollout.environment.tasks("train"), 1)


def test_tasks_without_a_recording_are_refused(directory: Path) -> None:
    with rollout_of(directory, [None]) as rollout, pytest.raises(ConfigError, match="no recording"):
        rollout.fitting("train", rollout.environment.tasks("train"), 1)


def test_groups_are_the_recordings_without_log_probs_or_versions(directory: Path) -> None:
    recordings = [
        TaskRecording([user("A?"), said("One."), user("B?"), said("Two.")]),
        TaskRecording(texts=(("Where? ", False), ("here", True))),
    ]
    with rollout_of(directory, recordings) as rollout:
        tasks = rollout.fitting("train", rollout.environment.tasks("train"), 1)
        rollout.load_weights(iter([("never", torch.zeros(1))]), version=3)
        groups = rollout.collect(tasks, samples_per_prompt=1)
        assert rollout.version == 3 and rollout.hashes_weights
    batch = make_batch([one for group in groups for one in group.usable])
    assert batch.logprobs_known is not None and not batch.logprobs_known.any()
    assert batch.versions is not None and bool((batch.versions == -1).all())
    responses = [turn.response for group in groups for turn in group.trajectories[0].turns]
    assert responses == ["One.", "Two.", "here"]
    trained = [
        rollout.tokenizer.decode(row[mask].tolist(), False)
        for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)
    ]
    assert trained == ["One.<|im_end|>Two.<|im_end|>", "here<|im_end|>"]


def test_a_prompt_and_a_completion_go_through_the_template_where_the_run_says_so(
    directory: Path,
) -> None:
    recording = TaskRecording(texts=(("Where?", False), ("here", True)))
    with rollout_of(directory, [recording], chat_template=True) as rollout:
        rollout.fitting("train", rollout.environment.tasks("train"), 1)
        expected = rollout.tokenizer.render([user("Where?")]) + "⟦here<|im_end|>⟧\n"
    assert rollout.samples["train"] == expected


def test_the_engine_in_their_place_samples_nothing(directory: Path) -> None:
    from rlflow.components import ENGINE
    from rlflow.rollout.engine import Sampling
    from rlflow.rollout.engine_facts import engine_facts

    assert engine_facts({"name": "recorded"}).recorded
    assert not engine_facts({"name": "embedded"}).recorded
    engine = ENGINE.build({"name": "recorded", "too_long": "truncate"})
    with pytest.raises(ConfigError, match="too_long"):
        ENGINE.build({"name": "recorded", "too_long": "bend"})
    with pytest.raises(RolloutError, match="samples nothing"):
        engine.generate([1], Sampling(1)).send(None)
