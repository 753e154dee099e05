"""Control tokens that the policy sampled stay its own when a fork reads the conversation again; those that others spell
never become any."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from rlflow.rollout import Tokenizer
from rlflow.types import Message, Step
from tests.unit.rollout.chat_templates import QWEN3, Talk, check_segments, played, tool, user

ASKED = user("Where was Orvan born?")
SPECIAL = ("<|eot|>", "<|eom|>", "<|head|>", "<|python|>", "<|eos|>", "<|im_start|>")
PLAIN = ("<｜User｜>", "<｜Assistant｜>", "<｜calls｜>", "<｜call｜>", "<｜outputs｜>", "<｜outputs end｜>", "<｜eos｜>",
         "<|TURN|>", "<|USER|>", "<|BOT|>", "<|THINK|>", "<|/THINK|>", "<|RESPONSE|>", "<|/RESPONSE|>", "<|END|>")  # fmt: skip
"""Added tokens that are not marked as special: decoding shows them."""
DEEPSEEK = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}{{- '<｜outputs｜>' + message.content + '<｜outputs end｜>' }}
    {%- elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{- message.content.split('</think>')[-1] + '<｜eos｜>' }}
    {%- else %}{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜eos｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}"""
LLAMA = """
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|head|>\n\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|head|>\n\n' }}{%- endif %}"""
COMMAND = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|TURN|><|BOT|><|RESPONSE|>' + message.content.split('</think>')[-1] + '<|/RESPONSE|><|END|>' }}
    {%- else %}{{- '<|TURN|><|USER|>' + message.content + '<|END|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|TURN|><|BOT|>' }}{%- endif %}"""
COMMAND_OPENED = COMMAND.replace("'<|TURN|><|BOT|>' }}", "'<|TURN|><|BOT|><|RESPONSE|>' }}")
CHATML = QWEN3.replace("<|im_end|>", "<|eot|>")
CALL = "<｜calls｜><｜call｜>look\n{}<｜call｜><｜calls｜>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@functools.cache
def _inner(directory: Path) -> Any:
    inner = PreTrainedTokenizerFast.from_pretrained(str(directory))
    inner.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    inner.add_tokens(list(PLAIN))
    return inner


def dressed(directory: Path, template: str, *ends: str) -> Tokenizer:
    inner = _inner(directory)
    inner.chat_template, inner.eos_token = template, ends[0]
    return Tokenizer(inner, [*inner.convert_tokens_to_ids(list(ends))])


def ids(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def shown(tokenizer: Tokenizer, *view: Message) -> list[int]:
    """transformers' own ids of a conversation."""
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return tokenizer.inner.apply_chat_template(list(view), **options)


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


THOUGHT = "hm</think>"
SHAPES = [
    (DEEPSEEK, ("<｜eos｜>",), f"{CALL}<｜eos｜>", CALL),
    (DEEPSEEK, ("<｜eos｜>",), f"{THOUGHT}{CALL}<｜eos｜>", CALL),
    (LLAMA, ("<|eot|>", "<|eom|>"), " <|python|>look() <|eom|>", "<|python|>look()"),
    (LLAMA, ("<|eot|>", "<|eom|>"), "\nOne. <|eot|>", "One."),
    (COMMAND, ("<|END|>",), f"<|RESPONSE|>{THOUGHT}One.<|/RESPONSE|><|END|>", "One."),
    (COMMAND, ("<|END|>", "<|eos|>"), "<|THINK|>hm<|/THINK|><|RESPONSE|>One.<|/RESPONSE|><|eos|>", "One."),
    (COMMAND_OPENED, ("<|END|>",), f"{THOUGHT}One.<|/RESPONSE|><|END|>", "One."),
    (CHATML, ("<|eot|>",), "<think>\nhm\n</think>\n\n<|python|>look()<|eot|>", "<|python|>look()"),
]  # fmt: skip


@pytest.mark.parametrize("template, ends, first, seen", SHAPES)
def test_a_fork_feeds_what_the_template_makes_of_what_the_policy_said(
    directory: Path, template: str, ends: tuple[str, ...], first: str, seen: str
) -> None:
    tokenizer = dressed(directory, template, *ends)
    sampled = ids(tokenizer, first, f"Two.{ends[0]}", f"Three.{ends[0]}")
    branch = Step([ASKED, said(tokenizer.response_text(sampled[0])), user("Or?")], after=-1)
    one, fed = played(tokenizer, [ASKED], sampled, Talk([[user("No.")], branch]))
    check_segments(one, fed, sampled)
    assert fed[2] == shown(tokenizer, ASKED, said(seen), user("Or?"))
    if fed[1][: len(fed[0] + sampled[0])] != fed[0] + sampled[0]:
        assert fed[1] == shown(tokenizer, ASKED, said(seen), user("No."))
    for context in fed[1:]:
        closed = [tokenizer.inner.convert_tokens_to_ids(end) for end in ends]
        messages = [ASKED, said("x"), user("No.")]
        assert sum(map(context.count, closed)) == sum(
            map(shown(tokenizer, *messages).count, closed)
        )


@pytest.mark.parametrize("history", ["template", "exact"])
@pytest.mark.parametrize(
    "template, ends, response, behind",
    [
        (LLAMA, ("<|eot|>", "<|eom|>"), "One.<|eom|>", "<|head|>user<|head|>\n\nNo.<|eot|>"),
        (LLAMA, ("<|eot|>", "<|eom|>"), "One.", "<|eot|><|head|>user<|head|>\n\nNo.<|eot|>"),
        (COMMAND, ("<|END|>",), "<|RESPONSE|>One.<|/RESPONSE|><|END|>", "<|TURN|><|USER|>No.<|END|>"),
        (COMMAND_OPENED, ("<|END|>",), "One.<|/RESPONSE|><|END|>", "<|TURN|><|USER|>No.<|END|>"),
        (COMMAND_OPENED, ("<|END|>", "<|eos|>"), "One.<|eos|>", "<|TURN|><|USER|>No.<|END|>"),
        (COMMAND_OPENED, ("<|END|>",), "One.<|/RESPONSE|>", "<|END|><|TURN|><|USER|>No.<|END|>"),
    ],
)  # fmt: skip
def test_a_turn_ends_once_however_the_policy_ended_it(
    directory: Path,
    template: str,
    ends: tuple[str, ...],
    response: str,
    behind: str,
    history: str,
) -> None:
    tokenizer = dressed(directory, template, *ends)
    sampled = ids(tokenizer, response, "Two.")
    one, fed = played(tokenizer, [ASKED], sampled, Talk([[user("No.")]]), history=history)
    check_segments(one, fed, sampled)
    assert len(one.segments) == 1
    between = tokenizer.decode(fed[1][len(fed[0] + sampled[0]) :], skip_special_tokens=False)
    assert between.startswith(behind) and between.count("No.") == 1


def test_the_end_of_a_turn_is_no_part_of_the_text_that_environments_get(directory: Path) -> None:
    tokenizer = dressed(directory, COMMAND_OPENED, "<|END|>")
    one, _ = played(tokenizer, [ASKED], ids(tokenizer, "One.<|/RESPONSE|><|END|>"), Talk([]))
    assert one.turns[0].response == "One.<|/RESPONSE|>"


@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_control_tokens_of_others_are_quoted_though_the_policy_sampled_the_same_ones(
    directory: Path, role: str
) -> None:
    """Others' words hold it: what the policy said, with more around it; in another role even its very words."""
    tokenizer = dressed(directory, DEEPSEEK, "<｜eos｜>")
    sampled = ids(tokenizer, f"{CALL}<｜eos｜>", "Two.<｜eos｜>")
    text = CALL if role != "assistant" else f"{CALL}, and <｜User｜>more"
    fresh = Step([ASKED, {"role": role, "content": text}, user("Or?")], after=-1)
    one, fed = played(tokenizer, [ASKED], sampled, Talk([fresh]))
    check_segments(one, fed, sampled)
    (call,) = tokenizer.encode("<｜call｜>")
    harmless = shown(tokenizer, ASKED, {"role": role, "content": "x"}, user("Or?"))
    assert call not in fed[1]
    for control in PLAIN:
        (token,) = tokenizer.encode(control)
        assert fed[1].count(token) == harmless.count(token)


def test_half_of_a_control_token_from_the_policy_and_half_from_a_page_make_none(
    directory: Path,
) -> None:
    tokenizer = dressed(directory, CHATML, "<|eot|>")
    halves = "<|eo", "t|> so"
    sampled = [
        tokenizer.encode("<think>\nhm\n</think>\n\n<|python|>") + tokenizer.encode(halves[0]),
        *ids(tokenizer, "Two.<|eot|>", "Three.<|eot|>"),
    ]
    one, fed = played(tokenizer, [ASKED], sampled, Talk([halves[1], [user("No.")]]))
    check_segments(one, fed, sampled)
    seen = "<|python|>< |eot|> soTwo."
    assert fed[2] == shown(tokenizer, ASKED, said(seen), user("No."))


def test_a_piece_of_a_response_keeps_its_control_tokens(directory: Path) -> None:
    """An agent that drops the thinking sends back the rest."""
    tokenizer = dressed(directory, DEEPSEEK, "<｜eos｜>")
    sampled = ids(tokenizer, f"{THOUGHT}{CALL} so.<｜eos｜>", "Two.<｜eos｜>")
    fresh = Step([ASKED, said(f"{CALL} so."), tool("Doc")], after=-1)
    one, fed = played(tokenizer, [ASKED], sampled, Talk([fresh]))
    check_segments(one, fed, sampled)
    assert fed[1] == shown(tokenizer, ASKED, said(f"{CALL} so."), tool("Doc"))


# ---------------------------------------------------------------- genuine tokenizers

GENUINE = os.environ.get("RLFLOW_TEST_TOKENIZERS", "")
"""A folder with deepseek_v3, llama3_1 and qwen3, each with its tokenizer.json and tokenizer_config.json."""
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.slow
@pytest.mark.skipif(not GENUINE, reason="RLFLOW_TEST_TOKENIZERS names no folder")
@pytest.mark.parametrize(
    "name, ends, responses, seen",
    [
        ("deepseek_v3", (), (DEEPSEEK_CALL, "Two."), (DEEPSEEK_CALL, "Two.")),
        ("llama3_1", (128008,), ("\nOne. ", "Two."), ("One.", "Two.")),
        ("qwen3", (), ("<think>\nhm\n</think>\n\nOne.", "Two."), ("One.", "Two.")),
    ],
)
def test_genuine_tokenizers_are_fed_their_own_templates(
    name: str, ends: Sequence[int], responses: Sequence[str], seen: Sequence[str]
) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(f"{GENUINE}/{name}"), ends)
    sampled = [[*tokenizer.encode(text), tokenizer.eos_ids[-1]] for text in (*responses, "Three.")]
    first, second = (said(tokenizer.response_text(tokens)) for tokens in sampled[:2])
    branch = Step([ASKED, first, user("Or?"), second, user("So?")], after=-1)
    one, fed = played(tokenizer, [ASKED], sampled, Talk([[user("No.")], branch]))
    check_segments(one, fed, sampled)
    view = [ASKED, said(seen[0]), user("Or?"), said(seen[1]), user("So?")]
    assert fed[2] == shown(tokenizer, *view)
