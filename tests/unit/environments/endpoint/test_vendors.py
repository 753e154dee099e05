"""Anthropic's messages and OpenAI's responses, by the vendors' own clients: the ids are those of the same conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from tests.unit.environments.endpoint.scripted import checked, environment, play
from tests.unit.rollout.chat_templates import QWEN3, dressed

pytest.importorskip("openai")
CALL = '\n<tool_call>\n{"name": "look", "arguments": {"for": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


ANTHROPIC = """
import anthropic
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}

async def agent(task, client):
    client = anthropic.AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key)
    asked = {"model": "m", "max_tokens": 300, "system": "Be brief.", "tools": [LOOK], "stop_sequences": ["STOP"]}
    messages = [{"role": "user", "content": "x"}]
    for streamed in (False, True, False):
        if streamed:
            async with client.messages.stream(**asked, messages=messages) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**asked, messages=messages)
        assert reply.stop_reason == "tool_use" and [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
        assert reply.content[0].text == "I look" and reply.content[1].input == {"for": "x"}
        assert reply.usage.output_tokens > 20 < reply.usage.input_tokens
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        told = [{"type": "tool_result", "tool_use_id": block.id, "content": "found"} for block in reply.content[1:]]
        messages.append({"role": "user", "content": told})
    told = 0
    for options in ({"extra_body": {"top_k": 5}}, {"tool_choice": {"type": "any"}}, {"messages": []}):
        try:
            await client.messages.create(**{**asked, "messages": messages, **options})
        except anthropic.BadRequestError as problem:
            told += problem.body["error"]["type"] == "invalid_request_error"
    try:
        await client.copy(base_url=str(client.base_url).split("/episodes")[0], api_key="no").messages.create(
            **asked, messages=messages)
    except anthropic.AuthenticationError as problem:
        told += problem.body["error"]["type"] == "authentication_error"
    await client.close()
    return told
"""


def test_anthropics_client(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    tokenizer, made = dressed(directory, QWEN3), environment(tmp_path, ANTHROPIC)
    (one,), fed = play(
        made, tokenizer, lambda text, number: "I look" + CALL * 2, max_response_tokens=400
    )
    checked(one, fed)
    assert one.reward == 4 and len(one.segments) == 1 and one.metrics["tool_calls"] == 6
    seen = tokenizer.decode(fed.contexts[2], False)
    assert seen.count("Be brief.") == 1 and seen.count("<tool_response>\nfound") == 4


RESPONSES = """
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}

async def agent(task, client):
    asked = {"model": "m", "instructions": "Be brief.", "tools": [LOOK]}
    given = [{"role": "user", "content": "x"}]
    reply = await client.responses.create(**asked, input=given)
    calls = [item for item in reply.output if item.type == "function_call"]
    assert reply.output_text == "I look" and [call.arguments for call in calls] == ['{"for": "x"}'] * 2
    told = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in calls]
    given += [item.model_dump() for item in reply.output] + told
    async with client.responses.stream(**asked, input=given) as events:
        kinds = [event.type async for event in events]
        reply = await events.get_final_response()
    assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed"
    assert reply.output_text == "I look" and reply.usage.output_tokens > 20
    await client.responses.create(**asked, input="Again.", previous_response_id=reply.id)
    try:
        await client.responses.create(model="m", input="x", previous_response_id="none")
    except openai.NotFoundError:
        return 1
"""


def test_openais_responses(directory: Path, tmp_path: Path) -> None:
    tokenizer, made = dressed(directory, QWEN3), environment(tmp_path, RESPONSES)
    (one,), fed = play(
        made, tokenizer, lambda text, number: "I look" + CALL * 2, max_response_tokens=400
    )
    checked(one, fed)
    assert one.reward == 1 and len(one.segments) == 1 and one.metrics["broken_histories"] == 0
    seen = tokenizer.decode(fed.contexts[2], False)
    assert (
        seen.count("Be brief.") == 1
        and seen.count("<tool_response>\nfound") == 2
        and "Again." in seen
    )


SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

@tool
def look(what: str) -> str:
    '''Looks something up.

    Args:
        what: the thing
    '''
    return f"{what} is 7"

async def agent(task, client):
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    player = ToolCallingAgent([look], model, max_steps=4, verbosity_level=0)
    return float(await asyncio.to_thread(player.run, task["prompt"]) == "7")
"""


@pytest.mark.slow
def test_an_agent_of_smolagents_calls_its_tools(directory: Path, tmp_path: Path) -> None:
    """It forces tool_choice, and sends its calls back as text: each turn is a segment, and a metric says so."""
    pytest.importorskip("smolagents", reason="smolagents is not installed: pip install smolagents")

    def says(text: str, number: int) -> str:
        name, arguments = (
            ("final_answer", '{"answer": "7"}') if "it is 7" in text else ("look", '{"what": "it"}')
        )
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    tokenizer, made = (
        dressed(directory, QWEN3),
        environment(tmp_path, SMOLAGENTS, sampling="ignore"),
    )
    found, fed = play(
        made, tokenizer, says, episodes=1, max_response_tokens=400, max_total_tokens=60_000
    )
    checked(found[0], fed)
    told = found[0].metrics
    assert found[0].reward == 1.0 and told["tool_calls"] == told["ignored_parameters"] == 2
    assert told["broken_histories"] == 1.0 and len(found[0].segments) == 2


LANGGRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def look(what: str) -> str:
    'Looks something up.'
    return f"{what} is 7"

async def agent(task, client):
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, streaming=STREAMING)
    graph = create_react_agent(model, [look])
    state = await graph.ainvoke({"messages": [("user", task["prompt"])]})
    return float(state["messages"][-1].content.endswith("It is 7."))
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_of_langgraph_is_one_segment(
    directory: Path, tmp_path: Path, streaming: bool
) -> None:
    pytest.importorskip(
        "langgraph", reason="langgraph is not installed: pip install langgraph langchain-openai"
    )

    def says(text: str, number: int) -> str:
        return (
            "It is 7."
            if "it is 7" in text
            else '<tool_call>{"name": "look", "arguments": {"what": "it"}}</tool_call>'
        )

    agent = LANGGRAPH.replace("STREAMING", str(streaming))
    tokenizer, made = dressed(directory, QWEN3), environment(tmp_path, agent)
    [one], fed = play(made, tokenizer, says, max_response_tokens=400)
    checked(one, fed)
    assert one.reward == 1.0 and len(one.segments) == 1
    assert one.metrics["tool_calls"] == 1 and one.metrics["broken_histories"] == 0
