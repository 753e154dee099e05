"""Tokenizers and chat templates of real models: what a policy is fed is what transformers' own rendering gives, token by token, and
calls of tools that the templates render are read back.

RLFLOW_TEST_TOKENIZERS: a folder with one of each, which `run.sh --full` makes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlflow.models.calls.form import TextCall
from rlflow.rollout import Tokenizer
from rlflow.types import Message
from tests.unit.rollout.chat_templates import (
    Talk,
    check_segments,
    conversations,
    played,
    tool,
    user,
)

FOLDER = os.environ.get("RLFLOW_TEST_TOKENIZERS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER, reason="RLFLOW_TEST_TOKENIZERS: no folder of real tokenizers (run.sh --full)"
    ),
]
NAMES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")
WITH_TOOLS = ("qwen3", "deepseek_v3")
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "most": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "Ilda"}}\n</tool_call>'


@functools.cache
def loaded(name: str) -> Tokenizer:
    return Tokenizer.from_pretrained(Path(FOLDER) / name)


def tokenizer_of(name: str, tools: Sequence[dict[str, Any]] = (), **options: Any) -> Tokenizer:
    equipped = loaded(name).with_tools(tools) if tools else loaded(name)
    return equipped.with_options(options) if options else equipped


@dataclass(frozen=True)
class Conversation:
    """said: the policy's turns; answers: what stands between them."""

    prompt: list[Message]
    said: list[str]
    answers: list[list[Message]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    names: Sequence[str] = NAMES
    options: dict[str, Any] = field(default_factory=dict)


SYSTEM: Message = {"role": "system", "content": "Be brief."}
TALKS = {
    "one turn": Conversation([user("Where is Orvan?")], ["In Ilda."], []),
    "a system's message": Conversation([SYSTEM, user("a")], ["b", "c"], [[user("d")]]),
    "three turns": Conversation([user("a")], ["x y", "z", "w"], [[user("b")], [user("c\n\nd")]]),
    "blanks around what is said": Conversation([user(" a ")], ["\n x \n", " z"], [[user("  b\n")]]),
    "other alphabets": Conversation(
        [user("Grüße, 你好")], ["Ответ \U0001f600", "é"], [[user("e\u0301?")]]
    ),
    "thinking": Conversation(
        [user("a")],
        ["<think>\nh\n</think>\n\nb", "<think>\ni\n</think>\n\nc"],
        [[user("d")]],
        names=("qwen3", "deepseek_v3"),
    ),
    "a thought alone": Conversation([user("a")], ["<think>\nh", "b"], [[user("d")]]),
    "tools": Conversation([user("a")], [CALL, "b"], [[tool("it is 7")]], [LOOK], ("qwen3",)),
    "thinking and tools": Conversation(
        [SYSTEM, user("a")],
        [
            f"<think>\nh\n</think>\n\n{CALL}",
            f"<think>\ni\n</think>\n\n{CALL}",
            "<think>\n\n</think>\n\nb",
            "c",
        ],
        [[tool("7")], [tool("8")], [user("d")]],
        [LOOK],
        ("qwen3",),
    ),
    "several calls at once": Conversation(
        [user("a")], [f"{CALL}\n{CALL}", "b"], [[tool("7"), tool("8")]], [LOOK], ("qwen3",)
    ),
    "without thinking": Conversation(
        [user("a")], ["b", "c"], [[user("d")]], names=("qwen3",), options={"enable_thinking": False}
    ),
}
AS_SAMPLED = [("qwen3", "blanks around what is said")]
"""Where the text is the same, but a template's token would span the prompt and the response: two line breaks are one token."""
CASES = [(name, talk) for talk, made in TALKS.items() for name in made.names]


def fed_of(
    tokenizer: Tokenizer, made: Conversation, history: str = "template"
) -> tuple[Any, list[list[int]], list[list[int]]]:
    """The trajectory, what was fed before each turn, and what the policy said."""
    end = tokenizer.eos_ids[0]
    said = [[*tokenizer.encode(text), end] for text in made.said]
    one, fed = played(tokenizer, made.prompt, said, Talk(made.answers), history=history)
    return one, fed, said


def rendered(tokenizer: Tokenizer, view: Sequence[Message]) -> list[int]:
    return tokenizer.inner.apply_chat_template(
        list(view),
        tools=tokenizer.tools or None,
        add_generation_prompt=True,
        return_dict=False,
        **tokenizer.options,
    )


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_what_is_fed_is_the_templates_own_rendering(name: str, talk: str) -> None:
    made = TALKS[talk]
    tokenizer = tokenizer_of(name, made.tools, **made.options)
    one, fed, said = fed_of(tokenizer, made)
    check_segments(one, fed, said)
    views = conversations(made.prompt, made.said, made.answers)
    expected = [rendered(tokenizer, view) for view in views[: len(fed)]]
    if (name, talk) in AS_SAMPLED:
        assert fed != expected
        assert [tokenizer.decode(ids, False) for ids in fed] == [
            tokenizer.decode(ids, False) for ids in expected
        ]
    else:
        assert fed == expected


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_that_an_environment_quotes_stay_text(name: str) -> None:
    """The one difference by design: transformers makes control tokens of them."""
    tokenizer = tokenizer_of(name)
    quoted = tokenizer.decode([tokenizer.eos_ids[0]], skip_special_tokens=False)
    made = Conversation(
        [user(f"What is {quoted}?")], ["An end.", "Yes."], [[user(f"Not {quoted}?")]]
    )
    one, fed, said = fed_of(tokenizer, made)
    check_segments(one, fed, said)
    plain = Conversation([user("What is x?")], made.said, [[user("Not x?")]])
    _, expected, _ = fed_of(tokenizer, plain)
    ends = [[ids.count(tokenizer.eos_ids[0]) for ids in contexts] for contexts in (fed, expected)]
    assert ends[0] == ends[1]
    views = conversations(made.prompt, made.said, made.answers)
    assert [rendered(tokenizer, view).count(tokenizer.eos_ids[0]) for view in views[:2]] == [
        ends[0][0] + 1, ends[0][1] + 2]  # fmt: skip


ARGUMENTS: list[dict[str, Any]] = [
    {"what": "Ilda", "most": 3},
    {},
    {"what": 'a "b"\n\\n </tool_call> <｜tool▁call▁end｜> ü 你好 \U0001f600', "most": -1},
    {"what": "12", "deep": {"a": [1, None, True, {"b": 0.5}]}},
]


def written(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """The template's text by jinja alone: transformers drops a content that is None, which DeepSeek's asks for."""
    inner = tokenizer.inner
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        inner.chat_template
    )
    return template.render(messages=messages, bos_token=inner.bos_token, **options)


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_a_template_renders_are_read_back(name: str, count: int) -> None:
    tokenizer = tokenizer_of(name)
    for arguments in ARGUMENTS:
        calls = [TextCall("look", arguments), TextCall("find.it", {"what": "x"})][:count]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "" if name == "qwen3" else None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in calls
            ],
        }
        asked = written(tokenizer, [user("a")], add_generation_prompt=True)
        whole = written(tokenizer, [user("a"), message])
        said = whole.removeprefix(asked).removesuffix("\n")
        assert whole.startswith(asked) and "look" in said
        response = tokenizer.response_text(tokenizer.encode(said))
        assert tokenizer.call_reader.form is not None
        assert tokenizer.call_reader.read(response, [LOOK]).calls == calls


def test_templates_are_of_their_forms() -> None:
    forms = {name: tokenizer_of(name).call_reader for name in NAMES}
    named = {name: reader.form.name if reader.form else None for name, reader in forms.items()}
    assert named == {
        "qwen3": "json blocks",
        "deepseek_v3": "deepseek",
        "llama3_1": None,
        "gemma3": None,
    }
    assert {reader.in_thought for reader in forms.values()} == {False}


def test_a_policy_without_thinking_is_asked_behind_an_empty_thought() -> None:
    tokenizer = tokenizer_of("qwen3", enable_thinking=False)
    fed = tokenizer.encode_prompt([user("a")])
    assert tokenizer.decode(fed, False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    made = TALKS["without thinking"]
    one, fed_exact, said = fed_of(tokenizer, made, history="exact")
    check_segments(one, fed_exact, said)
    assert len(one.segments) == 1
