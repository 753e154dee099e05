"""Agents on OpenAI's client: what was sampled is kept as ids, whatever they do with their history."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from rlflow.errors import ConfigError
from rlflow.rollout import Tokenizer
from rlflow.types import StopReason
from tests.unit.environments.endpoint.scripted import checked, environment, play
from tests.unit.rollout.chat_templates import QWEN3, dressed

pytest.importorskip("openai")
pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


TALK = """
async def agent(task, client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["prompt"]}]
    for number in range(3):
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": f"and {number}?"})
    return 1.0 if "answer" not in task else -1.0
"""


def test_a_conversation_is_one_segment_of_the_ids_that_were_sampled(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (one,), fed = play(
        environment(tmp_path, TALK), tokenizer, lambda text, number: f"The answer {number}"
    )
    checked(one, fed)
    assert len(one.segments) == 1 and len(one.turns) == 3 and one.reward == 1.0
    assert one.stop is StopReason.TERMINATED and one.metrics["broken_histories"] == 0
    whole = tokenizer.decode(one.segments[0].tokens.tolist(), skip_special_tokens=False)
    said = [{"role": "assistant", "content": f"The answer {number}"} for number in range(3)]
    asked = [{"role": "user", "content": f"and {number}?"} for number in range(2)]
    view = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    view += [said[0], asked[0], said[1], asked[1], said[2]]
    assert whole + "\n" == tokenizer.inner.apply_chat_template(view, tokenize=False)
    # Bytes one by one: the text would have been tokenized otherwise
    assert tokenizer.encode("The answer 0") != fed.said[0][:-1]


BRANCHES = """
async def agent(task, client):
    async def ask(messages):
        reply = await client.chat.completions.create(model="m", messages=messages)
        return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]
    user = lambda text: {"role": "user", "content": text}
    main = await ask([user("main")])
    sub = await ask([user("sub-agent")])
    main = await ask([*main, user(sub[-1]["content"])])
    summary = await ask([user("main"), {"role": "assistant", "content": "A summary."}, user("on")])
    left, right = await asyncio.gather(ask([*main, user("left")]), ask([*main, user("right")]))
    return float(len(left) == len(right) == 6)
"""


def test_an_agent_that_branches_goes_on_by_the_ids_of_the_turn_it_goes_on_from(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (one,), fed = play(
        environment(tmp_path, BRANCHES), tokenizer, lambda text, number: f"The answer {number}"
    )
    checked(one, fed)
    assert one.reward == 1.0 and [turn.segment for turn in one.turns] == [0, 1, 0, 2, 0, 3]
    first, second = fed.contexts[0] + fed.said[0], fed.contexts[2] + fed.said[2]
    assert fed.contexts[2][: len(first)] == first
    assert fed.contexts[4][: len(second)] == fed.contexts[5][: len(second)] == second
    assert {len(context) > len(second) for context in fed.contexts[4:]} == {True}
    assert one.metrics["forks"] == 3 and one.metrics["broken_histories"] == 3 / 5


SUB_AGENTS = """
async def agent(task, client):
    async def converse(name):
        messages = [{"role": "user", "content": name}]
        for number in range(4):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": f"and {number}?"})
    await asyncio.gather(*map(converse, ("a", "b", "c", "d")))
    return 1
"""


def test_conversations_that_take_turns_are_a_segment_each(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (one,), fed = play(
        environment(tmp_path, SUB_AGENTS), tokenizer, lambda text, number: "Yes", max_turns=16
    )
    checked(one, fed)
    assert len(one.turns) == 16 and len(one.segments) == 4
    whole = sorted(zip(map(len, fed.contexts), map(len, fed.said)))[-4:]
    assert sum(map(len, one.segments)) == sum(map(sum, whole))
    assert one.metrics["forks"] == 3 and one.metrics["refed_tokens"] == 0
    assert one.metrics["broken_histories"] == 3 / 15


TOOLS = """
PARAMETERS = {"type": "object", "properties": {}}
SEARCH = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}}

async def agent(task, client):
    messages = [{"role": "user", "content": task["prompt"]}]
    for streamed in (False, True, False):
        asked = {"model": "m", "messages": messages, "tools": [SEARCH]}
        if streamed:
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.create(**asked, logprobs=True)
            assert "".join(one.token for one in reply.choices[0].logprobs.content[:6]) == "I look"
            assert reply.choices[0].logprobs.content[0].logprob == -0.5
            assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.content)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look"
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"for": "x"}'] * 2
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "found"})
    return 1
"""


def test_tools_and_streams_of_openais_client(directory: Path, tmp_path: Path) -> None:
    call = '\n<tool_call>\n{"name": "look", "arguments": {"for": "x"}}\n</tool_call>'
    tokenizer = dressed(directory, QWEN3)
    limits = {"max_response_tokens": 400}
    (one,), fed = play(
        environment(tmp_path, TOOLS), tokenizer, lambda text, number: "I look" + call * 2, **limits
    )
    checked(one, fed)
    assert (
        len(one.segments) == 1
        and one.metrics["tool_calls"] == 6
        and one.metrics["tools_unused"] == 0
    )
    assert '"name": "look"' in tokenizer.decode(fed.contexts[0])
    assert tokenizer.decode(fed.contexts[2]).count("<tool_response>\nfound") == 4


XML_CALL = (
    "<tool_call>\n<function=look>\n<parameter=what>\n12\n</parameter>\n<parameter=most>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
TYPED = """
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}, "most": {"type": "integer"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}

async def agent(task, client):
    messages = [{"role": "user", "content": task["prompt"]}]
    reply = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
    (call,) = reply.choices[0].message.tool_calls
    return float(call.function.arguments == '{"what": "12", "most": 3}')
"""


def test_calls_are_read_in_the_form_of_the_template_and_typed_by_the_schema(
    directory: Path, tmp_path: Path
) -> None:
    template = "{#- <parameter= #}" + QWEN3
    thought = f"<think>\n{XML_CALL}\n</think>\n\n"
    (one,), fed = play(
        environment(tmp_path, TYPED),
        dressed(directory, template),
        lambda text, number: thought + XML_CALL,
        max_response_tokens=600,
    )
    checked(one, fed)
    assert one.reward == 1.0 and one.metrics["tool_calls"] == 1


OPTIONS = """
async def agent(task, client):
    messages = [{"role": "user", "content": "x"}]
    told = []
    for options in ({"enable_thinking": False}, {}, {"enable_thinkin": 1}, {"messages": []}, 3):
        try:
            reply = await client.chat.completions.create(
                model="m", messages=messages, extra_body={"chat_template_kwargs": options})
            told.append(reply.choices[0].message.content)
        except openai.BadRequestError as problem:
            told.append(f"{problem.param}: {problem.body['message']}")
    open(FILE, "w").write("\\n".join(told))
    return 1
"""
OPTION = "{%- if add_generation_prompt and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"


@pytest.mark.parametrize("sampling", ["refuse", "ignore"])
def test_an_agents_options_of_the_template_are_rendered_with_or_refused(
    directory: Path, tmp_path: Path, sampling: str
) -> None:
    file = tmp_path / "told"
    made = environment(tmp_path, f"FILE = {str(file)!r}\n{OPTIONS}", sampling=sampling)
    tokenizer = dressed(directory, QWEN3 + OPTION)
    (one,), fed = play(made, tokenizer, lambda text, number: f"said {number}")
    checked(one, fed)
    ends = [
        tokenizer.decode(context, False).endswith("<think></think>") for context in fed.contexts
    ]
    told = file.read_text().split("\n")
    assert told[:2] == ["said 0", "said 1"] and ends[:2] == [True, False]
    if sampling == "ignore":
        assert told[2:4] == ["said 2", "said 3"] and one.metrics["ignored_parameters"] == 2
        assert ends[2:] == [False, False]
    else:
        assert "never reads 'enable_thinkin'. Did you mean 'enable_thinking'" in told[2]
        assert "'messages' is set by the rollout itself" in told[3] and len(ends) == 2
        assert all(line.startswith("chat_template_kwargs: ") for line in told[2:])
    assert "expected an object of options, found 3" in told[4]


REFUSED = """
async def agent(task, client):
    messages = [{"role": "user", "content": "x"}]
    told = []
    for options in ({"top_p": 0.9}, {"temperature": 0.2}, {"n": 2}, {"max_tokens": 0}, {"stop": [3]},
                    {"messages": []}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                    {"tool_choice": "required"}):
        try:
            await client.chat.completions.create(**{"model": "m", "messages": messages, **options})
        except openai.BadRequestError as problem:
            told.append(problem.body["message"])
    stranger = client.copy(api_key="none", base_url=str(client.base_url).split("/episodes")[0] + "/v1")
    try:
        await stranger.chat.completions.create(model="m", messages=messages)
    except openai.AuthenticationError as problem:
        told.append(problem.body["message"])
    try:
        await client.embeddings.create(model="m", input="x")
    except openai.NotFoundError as problem:
        told.append(problem.body["message"])
    await client.chat.completions.create(model="m", messages=messages, temperature=1.0, top_p=1, n=1, stop=None)
    assert len(told) == 10, told
    open(FILE, "w").write("\\n".join(told))
    return 1
"""


def test_what_training_cannot_honour_is_refused_with_the_reason(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = environment(tmp_path, f"FILE = {str(tmp_path / 'told')!r}\n{REFUSED}")
    made.sampled_at(1.0)
    (one,), fed = play(made, tokenizer, lambda text, number: "Yes")
    checked(one, fed)
    told = (tmp_path / "told").read_text().split("\n")
    expected = ["top_p: expected 1, found 0.9", "temperature: expected 1.0", "n: expected 1", "max_tokens", "stop:", "messages:",
                "image_url", "tool_choice: expected 'auto' or 'none'", "unknown key", "not found"]  # fmt: skip
    assert all(
        re.search(pattern, text, re.I) for pattern, text in zip(expected, told, strict=True)
    ), told


IGNORED = """
async def agent(task, client):
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], top_p=0.9, temperature=0.2)
    return 1
"""


def test_what_training_cannot_honour_is_ignored_and_counted_where_the_user_says_so(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = environment(tmp_path, IGNORED, sampling="ignore")
    made.sampled_at(1.0)
    (one,), _ = play(made, tokenizer, lambda text, number: "Yes")
    assert one.usable and one.metrics["ignored_parameters"] == 2


LIMITED = """
async def agent(task, client):
    messages, told = [{"role": "user", "content": "a" * 40}], []
    while True:
        try:
            reply = await client.chat.completions.create(model="m", messages=messages, stop=["."], max_tokens=MOST)
        except openai.BadRequestError as problem:
            told.append(problem.body["code"])
            if problem.body["code"] == "turn_limit_reached":
                return len(told)
            messages = [{"role": "user", "content": "shorter"}]
            continue
        told.append(reply.choices[0].finish_reason + reply.choices[0].message.content)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content + "."})
        messages.append({"role": "user", "content": "a" * 60})
"""


def test_an_agent_is_told_of_the_limits_and_its_episode_is_truncated(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = environment(tmp_path, f"MOST = None\n{LIMITED}")
    (one,), fed = play(
        made, tokenizer, lambda text, number: f"So {number}. ", max_total_tokens=150, max_turns=3
    )
    checked(one, fed)
    assert (
        one.stop is StopReason.MAX_TURNS and one.reward == 5
    )  # three responses, one too long, one too many
    assert [turn.segment for turn in one.turns] == [0, 0, 1]
    assert (
        tokenizer.decode(fed.contexts[1], False).count("So 0. ") == 1
    )  # the stop string came back, the blank did not
    (tmp_path / "other").mkdir()
    made = environment(tmp_path / "other", f"MOST = 4\n{LIMITED}")
    (one,), fed = play(made, tokenizer, lambda text, number: "So it goes", max_turns=3)
    checked(one, fed)
    assert one.stop is StopReason.MAX_TURNS and {len(ids) for ids in fed.said} == {
        4
    }  # it went on after cuts of its own


UNSHOWN = """
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

async def agent(task, client):
    user, told = {"role": "user", "content": "x"}, []
    for messages, tools in FIRST, ([user], openai.NOT_GIVEN), LAST:
        try:
            await client.chat.completions.create(model="m", messages=messages, tools=tools)
        except openai.BadRequestError as problem:
            told.append(problem.body["code"] or problem.body["message"])
    return float(len(told)) if WANTED in told[0] else -1
"""
SHORT, LOOK = "([user], openai.NOT_GIVEN)", "([user], [LOOK])"
LONG = '([{"role": "user", "content": "x" * 900}], openai.NOT_GIVEN)'


@pytest.mark.parametrize(
    "first, last, wanted, stop, turns",
    [
        (LONG, SHORT, "context_length_exceeded", StopReason.TERMINATED, 2),
        (LONG, LONG, "context_length_exceeded", StopReason.MAX_TOKENS, 1),
        (LOOK, SHORT, "no place for them", StopReason.TERMINATED, 2),
        (SHORT, LOOK, "no place for them", StopReason.TERMINATED, 2),
    ],
)
def test_a_request_that_cannot_be_shown_is_refused_and_others_are_answered(
    tokenizer: Tokenizer,
    tmp_path: Path,
    first: str,
    last: str,
    wanted: str,
    stop: StopReason,
    turns: int,
) -> None:
    agent = UNSHOWN.replace("FIRST", first).replace("LAST", last).replace("WANTED", repr(wanted))
    made = environment(tmp_path, agent)
    (one,), fed = play(made, tokenizer, lambda text, number: "Yes", max_total_tokens=500)
    checked(one, fed)
    assert one.stop is stop and len(one.turns) == turns and one.reward == 1 + (first == last)


def test_an_agent_that_got_no_response_aborts_its_episode(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agent = UNSHOWN.replace(f"FIRST, {SHORT}, LAST", f"{LOOK},").replace("WANTED", '""')
    (one,), _ = play(environment(tmp_path, agent), tokenizer, lambda text, number: "Yes")
    assert "got no response" in one.error


LATE = """
async def agent(task, client):
    user = {"role": "user", "content": "x"}
    reply = await client.chat.completions.create(model="m", messages=[user])
    try:
        late = [user, reply.choices[0].message, {"role": "system", "content": "a"}, user]
        await client.chat.completions.create(model="m", messages=late)
    except openai.BadRequestError as problem:
        await client.chat.completions.create(model="m", messages=[user, late[1], user])
        return float("rollout.history=template" in problem.body["message"])
"""


def test_a_message_that_the_template_leaves_out_is_one_requests_problem(
    directory: Path, tmp_path: Path
) -> None:
    template = QWEN3.replace("{%- else %}", "{%- elif message.role != 'system' or loop.first %}", 1)
    assert template != QWEN3
    says = "<think>\nh\n</think>\n\nYes"
    tokenizer, made = dressed(directory, template), environment(tmp_path, LATE)
    (one,), fed = play(made, tokenizer, lambda text, number: says, history="exact")
    checked(one, fed)
    assert one.reward == 1 and len(one.turns) == 2 and len(one.segments) == 1


def test_a_response_that_fills_the_episode_to_the_token_is_rewarded_once(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = environment(tmp_path, LIMITED.replace("MOST", "None"))
    (one,), _ = play(made, tokenizer, lambda text, number: "So.", max_turns=1)
    most = len(one.segments[0])
    (full,), _ = play(made, tokenizer, lambda text, number: "So.", max_total_tokens=most)
    assert full.stop is StopReason.MAX_TOKENS and full.reward == one.reward == 2


def test_many_episodes_at_once_are_kept_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found, _ = play(
        environment(tmp_path, TALK),
        tokenizer,
        lambda text, number: f"The answer {number}",
        episodes=64,
    )
    assert all(one.usable and len(one.segments) == 1 and one.reward == 1.0 for one in found)
    assert sum(len(one.turns) for one in found) == 192


ASKS = """
BEGUN = []
async def agent(task, client):
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
"""
CLOSES = """BEGUN.append(1)
    for _ in BEGUN[1:]:
        await asyncio.sleep(0.05)
        await client.models.list()
    await client.close()
    return 1"""


@pytest.mark.parametrize(
    ("rest", "reward", "told"),
    [
        (CLOSES, 1.0, ""),  # its own client, not that of the other episodes, which ask on
        ("import numpy\n    return numpy.float32(0.5)", 0.5, ""),
        ("import numpy\n    return numpy.bool_(True)", 1.0, ""),
        ("return 1e19", 0.0, r"expected a number to 1e\+18"),
        ("return 10**400", 0.0, r"expected a number to 1e\+18"),
        (
            "await client.chat.completions.create(model='m', messages=5)",
            0.0,
            r"agent.py:6 in agent",
        ),
        ("raise asyncio.CancelledError  # of a tool's task", 0.0, "agent CancelledError"),
    ],
)
def test_how_functions_end(
    rest: str, reward: float, told: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    found, _ = play(
        environment(tmp_path, f"{ASKS}    {rest}\n"),
        tokenizer,
        lambda text, number: "yes",
        episodes=3,
    )
    assert [one.usable for one in found] == [not told] * 3, found[0].error
    assert all(one.reward == reward and re.search(told, one.error) for one in found), found[0].error


def test_an_agent_that_hangs_after_a_limit_is_truncated(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    hangs = "    try:\n        await agent(task, client)\n    finally:\n        await asyncio.sleep(9)\n"
    made = environment(tmp_path, ASKS + hangs, timeout_s=0.3)
    (one,), _ = play(made, tokenizer, lambda text, number: "yes", max_turns=1)
    assert (one.stop, one.reward) == (StopReason.MAX_TURNS, 0.0), one.error


def test_a_reward_that_hangs_aborts_its_episode_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    hangs = "import threading\n\ndef reward(task, played):\n    threading.Event().wait()\n"
    (tmp_path / "judge.py").write_text(hangs)
    made = environment(tmp_path, ASKS, reward=f"{tmp_path / 'judge.py'}:reward", timeout_s=1.0)
    found, _ = play(made, tokenizer, lambda text, number: "yes", episodes=40)
    told = "environment.reward (limit: environment.timeout_s) did not end within 1 s"
    assert all(told in one.error for one in found), {one.error for one in found}


def test_a_reward_may_be_awaited(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "async def late():\n    return 0.5\ndef reward(task, played):\n    return late()\n"
    )
    made = environment(tmp_path, ASKS, reward=f"{tmp_path / 'judge.py'}:reward")
    assert play(made, tokenizer, lambda text, number: "yes")[0][0].reward == 0.5


def test_a_fixed_port_is_free_again_for_the_next_event_loop(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = environment(tmp_path, f"{ASKS}    return 1\n", port=port)

    async def begun() -> None:
        await made.close(await made.reset(made.tasks("train")[0]))

    for _ in range(2):
        asyncio.run(begun())  # and nobody shuts it down
    assert play(made, tokenizer, lambda text, number: "yes")[0][0].reward == 1.0


def test_an_agent_that_would_hold_up_the_event_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected `async def`, found function"):
        environment(tmp_path, "def agent(task, client):\n    return 1\n")
