"""Chat templates of the structure of well-known models', and episodes of messages without a model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from rlflow.environment import Environment
from rlflow.net.calls import CallThreads
from rlflow.rollout import Completion, Sampling, Tokenizer
from rlflow.rollout.episodes import Attempt, EpisodeLimits, EpisodePlayer
from rlflow.types import Episode, Message, Step, Task, Trajectory

CONTROL = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|User|>",
    "<|Assistant|>",
    "[INST]",
    "[/INST]",
)
QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- set seen = namespace(query=messages | length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- if seen.seeking and message.role == 'user' %}
        {%- set seen.seeking = false %}
        {%- set seen.query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > seen.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
QWEN25 = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA31 = """
{{- '<|endoftext|><|im_start|>system\n\nCutting Knowledge Date: December 2023<|im_end|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' + role + '\n\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""
DEEPSEEK_R1 = """
{{- '<|endoftext|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}
    {%- else %}{{- '<|User|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""
GPT_OSS = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>tool<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- '<|endoftext|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- message.content + '<|im_end|>' }}
    {%- elif message.role == 'user' %}
        {%- if message == users[-1] and tools %}{{- 'TOOLS ' + tools | tojson }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{- 'RESULT ' + message.content }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_V3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must\n alternate') }}{%- endif %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


@functools.cache
def _with_control(directory: Path) -> Any:
    inner = Tokenizer.from_pretrained(directory).inner
    inner.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    return inner


def dressed(directory: Path, template: str, tools: Sequence[dict[str, Any]] = ()) -> Tokenizer:
    """The tokenizer of the directory with another template, and the control tokens that templates speak. The last one
    made is the one to use: they share what transformers has of it."""
    inner = _with_control(directory)
    inner.chat_template = template
    return Tokenizer(inner, [*inner.convert_tokens_to_ids(["<|end|>", "<|return|>"])], tools)


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a blank in front of what stands alone; whole are "Paris", "no" and "q"."""
    words = [
        word[:end]
        for word in ("\u2581Paris", "\u2581no", "\u2581q")
        for end in range(1, len(word) + 1)
    ]
    letters = ["<unk>", "<s>", "</s>", "<0x0A>", *map(chr, range(33, 127)), *words]
    merges = [(word[:-1], word[-1]) for word in dict.fromkeys(words) if len(word) > 1]
    vocab = {text: number for number, text in enumerate(dict.fromkeys(letters))}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        "\u2581", prepend_scheme="first", split=False
    )
    parts = [
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    inner.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    return made


class Talk(Environment):
    """Gives one answer (or Step) after another, then ends the episode. Steps of `replaced` replace what they say."""

    def __init__(
        self, answers: Sequence[Any], replaced: Mapping[int, dict[int, str]] | None = None
    ) -> None:
        self.answers, self.replaced = answers, replaced or {}

    def tasks(self, split: str) -> list[Task]:
        return []

    async def step(self, episode: Episode, response: str) -> Step:
        if episode.turns > len(self.answers):
            return Step(terminated=True)
        answer = self.answers[episode.turns - 1]
        return (
            answer
            if isinstance(answer, Step)
            else Step(answer, replace=self.replaced.get(episode.turns))
        )


def played(
    tokenizer: Any,
    prompt: list[Message],
    responses: Sequence[Sequence[int]],
    environment: Talk,
    **limits: Any,
) -> tuple[Trajectory, list[list[int]]]:
    """An episode in which the policy says the responses (ids), and what it was fed before each."""
    fed: list[list[int]] = []

    async def generate(tokens: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        said = list(responses[len(fed)])
        fed.append(list(tokens))
        return Completion(said, [-1.0] * len(said), [0] * len(said), "stop")

    values = {"max_turns": len(responses), "max_response_tokens": 512, "max_total_tokens": 4096, "max_observation_tokens": None,
              "temperature": 1.0, "chat_template": False, **limits}  # fmt: skip
    player = EpisodePlayer(environment, tokenizer, EpisodeLimits(**values), CallThreads(1, "test"))
    attempt = Attempt(Task("t", prompt), "g", "r", lambda turn: 0)
    return asyncio.run(player.play(attempt, generate)), fed


def check_segments(one: Trajectory, fed: Sequence[list[int]], sampled: Sequence[list[int]]) -> None:
    """Each response is trained once, in a segment that holds before it exactly what the policy saw."""
    assert one.usable and len(one.turns) == len(fed) == len(sampled)
    for turn, context, ids in zip(one.turns, fed, sampled):
        segment = one.segments[turn.segment]
        assert segment.tokens[: turn.stop].tolist() == context + ids and turn.start == len(context)
        assert segment.loss_mask[turn.start : turn.stop].all()
    assert sum(int(segment.loss_mask.sum()) for segment in one.segments) == sum(map(len, sampled))


def conversations(
    prompt: list[Message], said: Sequence[str], answers: Sequence[list[Message]]
) -> list[list[Message]]:
    """The messages in view before each response."""
    found = [list(prompt)]
    for text, answer in zip(said, answers):
        found.append([*found[-1], {"role": "assistant", "content": text}, *answer])
    return found


def check_contexts(
    tokenizer: Tokenizer, one: Trajectory, fed: Sequence[list[int]], views: Sequence[list[Message]]
) -> None:
    """What the policy saw is what transformers makes of the messages at that time: the same text, and where a segment
    begins the same ids."""
    for number, (context, view) in enumerate(zip(fed, views)):
        shared = {"tools": tokenizer.tools or None, "add_generation_prompt": True}
        expected = tokenizer.inner.apply_chat_template(view, tokenize=False, **shared)
        assert tokenizer.decode(context, skip_special_tokens=False) == expected
        if number == 0 or one.turns[number].segment != one.turns[number - 1].segment:
            assert context == tokenizer.inner.apply_chat_template(view, return_dict=False, **shared)
