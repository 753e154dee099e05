"""Templates that rewrite earlier turns: episodes fork into segments, and every segment is what the policy saw."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.algorithms.aggregates.means import sequence_mean
from rlflow.batching import make_batch
from rlflow.errors import ConfigError, EnvironmentContractError
from rlflow.rollout import Tokenizer
from rlflow.rollout.chat_engine import PiecedText, messages_of
from rlflow.rollout.episodes import LONG_TEXT
from rlflow.types import Episode, Message, Step, StopReason, Task
from tests.unit.rollout.chat_templates import (
    DEEPSEEK_R1,
    GPT_OSS,
    LLAMA31,
    MISTRAL,
    MISTRAL_V3,
    QWEN3,
    QWEN25,
    Talk,
    check_contexts,
    check_segments,
    conversations,
    dressed,
    metaspace,
    played,
    tool,
    user,
)

PROMPT = [user("Where was Orvan born?")]
THOUGHT = [
    "<think>\nhm\n</think>\n\nOne.",
    "<think>\nso\n</think>\n\nTwo.",
    "<think>\nah\n</think>\n\nThree.",
]
PLAIN = ["One.", "Two.", "Three."]
LOOKUP = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
USERS = [[user("No.")], [user("No, again.")]]
TOOLS = [[tool("Doc 1")], [tool("Doc 2"), tool("Doc 3")]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ended(tokenizer: Tokenizer, texts: list[str], end: bool = True) -> list[list[int]]:
    return [tokenizer.encode(text) + [tokenizer.eos_ids[0]] * end for text in texts]


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(
    "template, tools, said, answers, segments",
    [
        (QWEN3, [], THOUGHT, USERS, [0, 1, 2]),
        (QWEN3, [], PLAIN, USERS, [0, 0, 0]),
        (QWEN3, LOOKUP, THOUGHT, TOOLS, [0, 0, 0]),  # thinking stays until the user speaks
        (QWEN3, LOOKUP, THOUGHT, [TOOLS[0], USERS[0]], [0, 0, 1]),
        (
            QWEN3,
            LOOKUP,
            ["<think>hm</think>One.", *THOUGHT[1:]],
            TOOLS,
            [0, 1, 1],
        ),  # spaced otherwise
        (QWEN25, [], THOUGHT, USERS, [0, 0, 0]),
        (QWEN25, [], THOUGHT, TOOLS, [0, 0, 0]),
        (LLAMA31, [], PLAIN, TOOLS, [0, 0, 0]),
        (LLAMA31, [], ["One.", "\nTwo. ", "Three."], USERS, [0, 0, 1]),
        (DEEPSEEK_R1, [], ["hm</think>One.", "Two.", "Three."], USERS, [0, 1, 2]),
        (MISTRAL, [], PLAIN, USERS, [0, 0, 0]),
        (MISTRAL, LOOKUP, PLAIN, USERS, [0, 1, 2]),  # tools move to the last message of the user
        (MISTRAL, LOOKUP, PLAIN, TOOLS, [0, 0, 0]),
    ],
)
def test_segments_are_what_transformers_templates_show(
    directory: Path,
    template: str,
    tools: list[Any],
    said: list[str],
    answers: list[Any],
    segments: list[int],
    end: bool,
) -> None:
    tokenizer = dressed(directory, template, tools)
    sampled = ended(tokenizer, said, end)
    one, fed = played(tokenizer, PROMPT, sampled, Talk(answers))
    check_segments(one, fed, sampled)
    check_contexts(tokenizer, one, fed, conversations(PROMPT, said, answers))
    assert [turn.segment for turn in one.turns] == segments and len(one.segments) == segments[
        -1
    ] + 1
    assert one.metrics["forks"] == segments[-1]
    total = sum(map(len, one.segments))
    counted = len(fed[0]) + sum(
        one.metrics[name] for name in ("response_tokens", "observation_tokens", "refed_tokens")
    )
    assert total == counted and (one.metrics["refed_tokens"] > 0) == (segments[-1] > 0)


def test_a_fork_feeds_again_what_stood_before_the_answer(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN3)
    sampled = ended(tokenizer, THOUGHT[:2])
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS[:1]))
    before = "<|im_start|>user\nWhere was Orvan born?<|im_end|>\n<|im_start|>assistant\nOne."
    behind = "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(fed[1], skip_special_tokens=False) == before + behind
    assert one.metrics["refed_tokens"] == len(tokenizer.encode(before))
    assert one.metrics["observation_tokens"] == len(tokenizer.encode(behind))


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1, GPT_OSS, LLAMA31])
@pytest.mark.parametrize("end", [True, False])
def test_exact_history_keeps_everything_as_sampled_in_one_segment(
    directory: Path, template: str, end: bool
) -> None:
    tokenizer = dressed(directory, template)
    said = [" <think>hm</think> One. ", *THOUGHT[1:]]
    sampled = ended(tokenizer, said, end)
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS), history="exact")
    check_segments(one, fed, sampled)
    assert len(one.segments) == 1 and one.metrics["forks"] == one.metrics["refed_tokens"] == 0
    plain = conversations(PROMPT, PLAIN, USERS)
    texts = [tokenizer.render(view) for view in plain]
    ends = ["<|im_end|>", "<|end|>"] if end else []  # the template's, or another
    for number, (earlier, later) in enumerate(itertools.pairwise(fed)):
        between = tokenizer.decode(
            later[len(earlier) + len(sampled[number]) :], skip_special_tokens=False
        )
        expected = texts[number + 1].rpartition(PLAIN[number])[2]
        for close in ends:
            expected = expected.removeprefix(close)
        assert between == expected and USERS[number][0]["content"] in between


CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"


def test_a_policy_that_opens_its_turns_itself_is_seen_as_the_template_shows_it(
    directory: Path,
) -> None:
    tokenizer = dressed(directory, GPT_OSS)
    sampled = [tokenizer.encode(CHANNELS.format(text)) for text in PLAIN]
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS))
    check_segments(one, fed, sampled)
    check_contexts(tokenizer, one, fed, conversations(PROMPT, PLAIN, USERS))
    assert [turn.segment for turn in one.turns] == [0, 1, 2]
    one, fed = played(tokenizer, PROMPT, sampled[:2], Talk([[tool("Doc 1")]]), history="exact")
    check_segments(one, fed, sampled[:2])
    shown = tokenizer.decode(fed[1][len(fed[0]) :], skip_special_tokens=False)
    answer = '<|start|>tool<|channel|>commentary<|message|>"Doc 1"<|end|><|start|>assistant'
    assert shown == CHANNELS.format("One.") + answer


def test_a_turn_that_the_template_would_show_as_another_is_refused(directory: Path) -> None:
    """A call stands in a channel of its own: the template would put it into the final one."""
    tokenizer = dressed(directory, GPT_OSS)
    call = tokenizer.encode("<|channel|>commentary to=look<|message|>{}<|return|>")
    refusal = r"puts '<\|channel\|>final<\|message\|>' in front .*rollout\.history=exact"
    one, _ = played(tokenizer, PROMPT, [call, call], Talk(USERS))
    assert not one.usable and len(one.turns) == 1  # what a policy says ends no run
    assert re.search(refusal, one.error)


def test_exact_history_is_refused_where_the_answer_stands_elsewhere(directory: Path) -> None:
    latest_first = QWEN25.replace(
        "for message in messages %}", "for message in messages[-1:] + messages[:-1] %}"
    )
    tokenizer = dressed(directory, latest_first)
    sampled = ended(tokenizer, PLAIN)
    with pytest.raises(
        EnvironmentContractError, match=r"does not show .* behind the response.*history=template"
    ):
        played(tokenizer, PROMPT, sampled, Talk(USERS), history="exact")
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS))
    check_contexts(tokenizer, one, fed, conversations(PROMPT, PLAIN, USERS))


def test_the_note_for_the_start_says_what_becomes_of_thinking(directory: Path) -> None:
    notes = {
        template: dressed(directory, template).history_note
        for template in (QWEN25, LLAMA31, QWEN3, DEEPSEEK_R1, GPT_OSS)
    }
    assert notes[QWEN25] == notes[LLAMA31] == ""
    for template in (QWEN3, DEEPSEEK_R1, GPT_OSS):
        assert "rollout/forks" in notes[template]
        assert ("calls of tools" in notes[template]) == (template == GPT_OSS)


def test_long_texts_are_tokenized_beside_the_loop_while_agents_hold_the_threads_of_asyncio(
    directory: Path,
) -> None:
    threads: list[threading.Thread] = []
    released = threading.Event()

    class Watched(Tokenizer):
        def encode(self, text: str) -> list[int]:
            if len(text) > LONG_TEXT:
                threads.append(threading.current_thread())
            return super().encode(text)

    class Held(Talk):
        async def reset(self, task: Task) -> Episode:
            pool = ThreadPoolExecutor(1)
            asyncio.get_running_loop().set_default_executor(pool)
            pool.submit(released.wait)
            return Episode(task)

        async def close(self, episode: Episode) -> None:
            released.set()

    tokenizer = Watched(dressed(directory, QWEN25).inner)
    long = [user("a" * (LONG_TEXT + 1))]
    limits = {"max_total_tokens": 300_000, "episode_s": 20.0}
    one, _ = played(tokenizer, long, ended(tokenizer, PLAIN), Held([long, long]), **limits)
    assert one.usable and len(one.turns) == 3
    assert len(threads) >= 3 and threading.main_thread() not in threads


def test_an_unknown_history_is_a_mistake(directory: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.history: expected template or exact, found 'exakt'"
    ):
        played(dressed(directory, QWEN3), PROMPT, [[1]], Talk([]), history="exakt")


def test_text_between_responses_is_part_of_the_turn_that_the_template_shows_later(
    directory: Path,
) -> None:
    tokenizer = dressed(directory, QWEN3)
    sampled = ended(tokenizer, [THOUGHT[0], "Two.", "Three.", "Four."], end=False)
    one, fed = played(
        tokenizer,
        PROMPT,
        sampled,
        Talk([" [a long page] ", USERS[0], " b"]),
        max_observation_tokens=6,
    )
    check_segments(one, fed, sampled)
    assert [turn.segment for turn in one.turns] == [0, 0, 1, 1] and one.metrics[
        "observations_cut"
    ] == 1
    shown = tokenizer.decode(tokenizer.encode(" [a long page] ")[:6])
    turn = {"role": "assistant", "content": f"{THOUGHT[0]}{shown}Two."}
    expected = tokenizer.render([*PROMPT, turn, *USERS[0]])
    assert (
        fed[2] == tokenizer.encode(expected)
        and f"One.{shown}Two." in expected
        and "page]" not in expected
    )


def test_spelled_control_tokens_stay_text_when_a_fork_reads_them_again(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN3)
    spelled = [token for part in ("<|im_", "end|>") for token in tokenizer.encode(part)]
    said = [*tokenizer.encode("<think>\nhm\n</think>\n\n"), *spelled]
    sampled = [[*said, tokenizer.eos_ids[0]], tokenizer.encode("Two.")]
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS[:1]))
    check_segments(one, fed, sampled)
    text = tokenizer.decode(fed[1], skip_special_tokens=False)
    assert len(one.segments) == 2 and "< |im_end|>" in text
    assert text.count("<|im_end|>") == fed[1].count(tokenizer.eos_ids[0]) == 3


def test_an_empty_turn_is_seen_as_the_template_shows_it(directory: Path) -> None:
    """What the template inserts begins where the empty response ends, and yet does not continue it."""
    inserting = QWEN25.replace(
        "message.content + '<|im_end|>",
        "message.get('x', 'so far ') + message.content + '<|im_end|>",
    )
    tokenizer = dressed(directory, inserting)
    sampled = [[tokenizer.eos_ids[0]], *ended(tokenizer, PLAIN[1:2])]
    one, fed = played(
        tokenizer, [{**PROMPT[0], "x": ""}], sampled, Talk([[{**USERS[0][0], "x": ""}]])
    )
    check_segments(one, fed, sampled)
    shown = "<|im_start|>assistant\nso far <|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert (
        tokenizer.decode(fed[1], skip_special_tokens=False).endswith(shown)
        and len(one.segments) == 2
    )


def test_another_end_token_than_the_templates_stands_in_its_place(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    sampled = [tokenizer.encode("One.<|end|>"), tokenizer.encode("Two.")]
    one, fed = played(tokenizer, PROMPT, sampled, Talk(USERS[:1]))
    check_segments(one, fed, sampled)
    shown = tokenizer.decode(fed[1][len(fed[0]) :], skip_special_tokens=False)
    assert shown.startswith("One.<|end|>\n<|im_start|>user") and len(one.segments) == 1


def test_replaced_observations_and_forks_do_not_mix(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN3)
    sampled = ended(tokenizer, [*THOUGHT, "Four."])
    for answers, replaced in (
        (["page", "x", USERS[0]], {2: {0: "y"}}),
        (["page", USERS[0], "x"], {3: {0: "y"}}),
    ):
        with pytest.raises(
            EnvironmentContractError, match=r"Step\.replace: .*rollout\.history=exact"
        ):
            played(tokenizer, PROMPT, sampled, Talk(answers, replaced))
        one, fed = played(tokenizer, PROMPT, sampled, Talk(answers, replaced), history="exact")
        check_segments(one, fed, sampled)


def test_what_a_replacement_would_break_is_refused(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    with pytest.raises(
        EnvironmentContractError,
        match=r"Step\.replace: the observation of turn 0 consists of messages",
    ):
        played(tokenizer, PROMPT, ended(tokenizer, THOUGHT), Talk(USERS, {2: {0: "left out"}}))


def test_an_observation_that_is_replaced_twice_leaves_no_segment_without_a_response(
    directory: Path,
) -> None:
    class Shortening(Talk):
        async def overflow(self, episode: Episode) -> Step:
            return Step("x", replace={0: ""})

    tokenizer = dressed(directory, QWEN25)
    sampled = ended(tokenizer, PLAIN)
    talk = Shortening(["a" * 200, "b" * 200], {2: {0: "c" * 200}})
    one, fed = played(tokenizer, "Q", sampled, talk, max_total_tokens=300)
    check_segments(one, fed, sampled)
    assert [bool(segment.loss_mask.any()) for segment in one.segments] == [True, True]


def test_a_prompt_may_come_with_an_empty_list_of_tools(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    sampled = ended(tokenizer, PLAIN[:2])
    one, fed = played(tokenizer, PROMPT, sampled, Talk([Step([user("New?")], after=-1, tools=[])]))
    check_segments(one, fed, sampled)
    assert "New?" in tokenizer.decode(fed[1]) and len(one.segments) == 2


def test_a_text_that_is_rewritten_to_the_same_ids_forks_nothing() -> None:
    """Mistral's template puts a blank in front of a response, which Metaspace tokenizers put there as well."""
    tokenizer = Tokenizer(metaspace())
    tokenizer.inner.chat_template = MISTRAL_V3
    sampled = ended(tokenizer, ["Paris", "no", "Paris"])
    one, fed = played(tokenizer, [user("q")], sampled, Talk([[user("no")], [user("no")]]))
    check_segments(one, fed, sampled)
    assert len(one.segments) == 1 and one.metrics["forks"] == 0 and len(one.turns) == 3
    assert fed[1] == tokenizer.encode("<s>[INST]q[/INST] Paris</s>[INST]no[/INST]")


def test_a_fork_counts_against_the_token_budget_by_what_is_in_view(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN3)
    long = f"<think>\n{'hm ' * 60}\n</think>\n\nOne."
    sampled = ended(tokenizer, [long, long, "Two."])
    whole, fed = played(tokenizer, PROMPT, sampled, Talk(USERS))
    most = max(map(len, whole.segments))
    one, _ = played(tokenizer, PROMPT, sampled, Talk(USERS), max_total_tokens=most)
    assert len(one.turns) == 3 and one.stop is StopReason.TERMINATED
    kept, _ = played(
        tokenizer, PROMPT, sampled, Talk(USERS), max_total_tokens=most, history="exact"
    )
    assert len(kept.turns) < 3 and kept.stop is StopReason.MAX_TOKENS
    cut, _ = played(tokenizer, PROMPT, sampled, Talk(USERS), max_total_tokens=len(fed[1]))
    assert (
        cut.stop is StopReason.MAX_TOKENS
        and len(cut.turns) == len(cut.segments) == 1
        and not cut.metrics["forks"]
    )


def test_a_chat_server_gets_every_turn_and_strips_by_itself() -> None:
    text = PiecedText()
    sampled = [text.encode_response(said) for said in THOUGHT]
    one, fed = played(text, PROMPT, sampled, Talk(USERS))
    check_segments(one, fed, sampled)
    views = conversations(PROMPT, THOUGHT, USERS)
    assert [messages_of(text.decode(tokens, skip_special_tokens=False)) for tokens in fed] == views


# ---------------------------------------------------------------- random templates


ORDERS = ("messages", "messages[-1:] + messages[:-1]", "messages | sort(attribute='role')", "messages | reverse | list",
          "messages[-3:]", "messages[-1:]")  # fmt: skip
SHOWN = ("message.content", "message.content | trim", "message.content.split('</think>')[-1]",
         "message.content | replace('b', '')")  # fmt: skip
INSERTED = ("", "'so far ' + ", "'[' ~ loop.index ~ ' of ' ~ messages | length ~ '] ' ~ ")


@st.composite
def random_template(draw: st.DrawFn) -> tuple[str, str]:
    """(template, how it orders messages): it strips, inserts and reorders, earlier turns only or all of them."""
    order, shown, inserted = (
        draw(st.sampled_from(ORDERS)),
        draw(st.sampled_from(SHOWN)),
        draw(st.sampled_from(INSERTED)),
    )
    when = draw(st.sampled_from(("true", "not loop.last", "loop.index < messages | length - 1")))
    tail = draw(st.sampled_from(("", "<think>\\n")))
    return (
        f"{{%- for message in {order} %}}{{{{- '<|im_start|>' + message.role + '\\n' }}}}"
        f"{{%- if message.role == 'assistant' and {when} %}}{{{{- {inserted}{shown} }}}}"
        "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n{tail}' }}}}{{%- endif %}}"
    ), order


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "a", "b", " ", "\n", "<|channel|>"]), max_size=8
)
ANSWERS = st.lists(
    st.lists(st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]),
                       st.sampled_from(["c", "d e", " f\n"])), min_size=1, max_size=2),
    min_size=2, max_size=3,
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    made=random_template(),
    said=st.lists(st.tuples(PIECES, st.booleans()), min_size=4, max_size=4),
    answers=ANSWERS,
    history=st.sampled_from(["template", "exact"]),
)
def test_trained_tokens_are_the_sampled_ones_whatever_a_template_does(
    directory: Path, made: tuple[str, str], said: Any, answers: list[list[Message]], history: str
) -> None:
    template, order = made
    tokenizer = dressed(directory, template)
    end = tokenizer.eos_ids[0]
    # Pieces one by one: a policy need not sample the ids that the tokenizer would choose
    sampled = [
        [token for piece in pieces for token in tokenizer.encode(piece)]
        + [end] * (closed or not pieces)
        for pieces, closed in said[: len(answers) + 1]
    ]
    texts = ["".join(pieces) for pieces, _ in said]
    try:
        one, fed = played(tokenizer, PROMPT, sampled, Talk(answers), history=history)
    except EnvironmentContractError as refused:
        assert history == "exact" and order != "messages" and "behind the response" in str(refused)
        return
    check_segments(one, fed, sampled)
    if history == "template":
        check_contexts(tokenizer, one, fed, conversations(PROMPT, texts, answers))
        assert one.metrics["forks"] == len(one.segments) - 1
        return
    assert len(one.segments) == 1
    for number, (earlier, later) in enumerate(itertools.pairwise(fed)):
        between = tokenizer.decode(
            later[len(earlier) + len(sampled[number]) :], skip_special_tokens=False
        )
        assert all(message["content"] in between for message in answers[number])
        if order == "messages":
            frames = [
                f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n"
                for one in answers[number]
            ]
            close = "" if sampled[number][-1] == end else "<|im_end|>"
            assert between.startswith(f"{close}\n{''.join(frames)}<|im_start|>assistant\n")


# ---------------------------------------------------------------- branches


def test_conversations_that_take_turns_are_a_segment_each(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN25)
    names = "abcd"
    sampled = ended(tokenizer, [f"{name}{number}" for number in range(4) for name in names])
    answers: list[Any] = [Step([user(name)], after=-1) for name in names[1:]]
    answers += [Step([user(f"{number}?")], after=number) for number in range(12)]
    one, fed = played(tokenizer, [user("a")], sampled, Talk(answers))
    check_segments(one, fed, sampled)
    assert [turn.segment for turn in one.turns] == [0, 1, 2, 3] * 4
    assert [len(segment) for segment in one.segments] == [
        len(context) + len(ids) for context, ids in zip(fed[12:], sampled[12:])
    ]
    assert one.metrics["forks"] == 3 and one.metrics["refed_tokens"] == 0


def test_a_request_that_reads_as_an_open_conversation_does_goes_on_in_it(directory: Path) -> None:
    """Nobody says that it follows: its tokens do."""
    tokenizer = dressed(directory, QWEN25)
    sampled = ended(tokenizer, [*PLAIN, "Four, and more."])
    again = [*PROMPT, {"role": "assistant", "content": "One."}, user("And?")]
    answers = [Step([user("sub-agent")], after=-1), Step(again, after=-1), Step(again, after=-1)]
    one, fed = played(tokenizer, PROMPT, sampled, Talk(answers))
    check_segments(one, fed, sampled)
    assert [turn.segment for turn in one.turns] == [0, 1, 0, 2]
    assert one.metrics["refed_tokens"] == len(fed[0] + sampled[0])


@pytest.mark.parametrize("template", [QWEN25, QWEN3])
def test_weights_do_not_depend_on_which_branch_was_asked_for_first(
    directory: Path, template: str
) -> None:
    tokenizer = dressed(directory, template)
    texts = {"trunk": THOUGHT[0], "left": "Left.", "a long way right": "Right.", "on": "On."}
    said = dict(zip(texts, ended(tokenizer, list(texts.values()))))
    found = []
    for order in itertools.permutations(["left", "a long way right", "on"]):
        asked = ["trunk", *order]
        answers = [Step([tool(name)], after=0) for name in order]
        one, fed = played(tokenizer, PROMPT, [said[name] for name in asked], Talk(answers))
        check_segments(one, fed, [said[name] for name in asked])
        assert len(one.segments) == 3
        batch = make_batch([one])
        shares = sequence_mean(batch)
        rows = zip(batch.tokens.tolist(), batch.loss_mask.tolist(), shares.tolist())
        found.append(sorted((*map(tuple, row),) for row in rows))
    assert all(rows == found[0] for rows in found)
