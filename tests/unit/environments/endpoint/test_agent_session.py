"""One episode's requests: who gets which answer, what is refused, what is remembered of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from rlflow.environment import SaidTokens
from rlflow.types import Episode, Task
from rlflow_environments.endpoint import (
    AgentSession,
    Endpoint,
    ModelRequest,
    RequestRefused,
    anthropic_messages,
    chat,
    openai_responses,
)
from rlflow_environments.endpoint.agent_session import KEPT
from rlflow_environments.endpoint.history import SaidHistory
from rlflow_environments.endpoint.requests import unsupported

USER = {"role": "user", "content": "x"}
Scenario = Callable[[AgentSession, "asyncio.Future[None]"], Coroutine[Any, Any, None]]


def here(gone: bool = False) -> Callable[[], Awaitable[bool]]:
    async def hung_up() -> bool:
        return gone

    return hung_up


def told(session: AgentSession, text: str) -> None:
    episode = Episode(Task("t", "x"), turns_left=9, sampled=SaidTokens(0, [], list))
    session.give(episode, text)


def asking(
    session: AgentSession, name: str = "name", again: bool = False, gone: bool = False
) -> asyncio.Task[Any]:
    return asyncio.ensure_future(session.ask(ModelRequest([USER]), name, again, here(gone)))


def in_a_loop(scenario: Scenario) -> None:
    async def run() -> None:
        await scenario(AgentSession(), asyncio.get_running_loop().create_future())

    asyncio.run(asyncio.wait_for(run(), 10))


def test_each_retry_of_equal_requests_gets_the_answer_that_nobody_got() -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        first = [asking(session, gone=gone) for gone in (False, True, True, False)]
        await asyncio.sleep(0)
        assert await session.next(ended)
        told(session, "0")
        retries = [asking(session, again=True)]  # of the second, which still waits
        await asyncio.sleep(0)
        assert await session.next(ended)
        told(session, "1")
        assert await session.next(ended)  # the third is gone: it is the fourth's
        told(session, "2")
        retries.append(asking(session, again=True))  # of the third, which was left out
        assert await session.next(ended)
        told(session, "3")
        got = [(await one).content for one in (first[0], retries[0], first[3], retries[1])]
        assert got == ["0", "1", "2", "3"] and session.counts.requests == 4

    in_a_loop(scenario)


def test_what_nobody_waits_for_any_more_is_not_sampled() -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        asked = [asking(session, str(number)) for number in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        await asyncio.sleep(0)
        assert await session.next(ended)
        told(session, "yes")
        assert (await asked[1]).content == "yes"
        ended.set_result(None)
        assert await session.next(ended) is None and session.counts.requests == 1
        session.close()
        with pytest.raises(RequestRefused, match="ended"):
            await asked[2]

    in_a_loop(scenario)


@pytest.mark.parametrize("names", ["abc", "cba", "bca"])
def test_requests_that_wait_together_are_answered_in_one_order_whichever_came_first(
    names: str,
) -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        answered = []
        asked = [asking(session, name) for name in names]
        await asyncio.sleep(0)
        for number in range(6):
            assert await session.next(ended)
            assert session._current is not None
            answered.append(session._current.name)
            told(session, "yes")
            if number < 3:  # what comes later waits for those that were there, whatever it says
                asked.append(asking(session, f"A{number}"))
                await asyncio.sleep(0)
        assert answered == ["a", "b", "c", "A0", "A1", "A2"]
        await asyncio.gather(*asked)

    in_a_loop(scenario)


def test_the_end_of_an_episode_answers_every_asker(caplog: pytest.LogCaptureFixture) -> None:
    """Those too whose place was given up, as they seemed gone."""

    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        asked = [asking(session, str(number), gone=number < 2) for number in range(3)]
        await asyncio.sleep(0)
        assert await session.next(ended)  # the third's
        session.close()
        for one in asked:
            with pytest.raises(RequestRefused, match="ended"):
                await asyncio.wait_for(one, 1)

    in_a_loop(scenario)
    assert not caplog.records


def test_a_request_that_two_askers_wait_for_stays_until_both_are_gone() -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        first = asking(session)
        await asyncio.sleep(0)
        again = asking(session, again=True)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert await session.next(ended)
        told(session, "yes")
        assert (await again).content == "yes" and session.counts.requests == 1
        gone = asking(session, "other")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        retry = asking(session, "other", again=True)
        await asyncio.sleep(0)
        step = await session.next(ended)
        assert step is not None and step.observation == [USER]
        told(session, "still")
        assert (await retry).content == "still"

    in_a_loop(scenario)


def test_replies_are_kept_for_retries_and_their_conversations_are_not() -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        for number in range(KEPT + 2):
            asked = asking(session, str(number))
            assert await session.next(ended)
            told(session, str(number))
            await asked
        assert len(session._newest) == KEPT
        assert not any(one.request.messages for one in session._newest)
        assert (await asking(session, str(number), again=True)).content == str(number)

    in_a_loop(scenario)


READERS: dict[str, Callable[[dict[str, Any]], ModelRequest]] = {
    "chat": chat.read,
    "anthropic": anthropic_messages.read,
    "responses": lambda body: openai_responses.read(body, {}),
}
JSON = {"type": "json_schema", "schema": {}}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}
BEGUN = [USER, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    "interface, body, name",
    [
        ("anthropic", {"output_config": {"format": JSON}}, "output_config.format"),
        ("anthropic", {"tool_choice": ONE_CALL}, "disable_parallel_tool_use"),
        ("chat", {"functions": [{"name": "look"}]}, "functions"),
        ("chat", {"function_call": {"name": "look"}}, "function_call"),
        ("chat", {"guided_json": {}}, "guided_json"),
        ("chat", {"structured_outputs": {"json": {}}}, "structured_outputs"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"background": True}, "background"),
        ("responses", {"background": False, "conversation": None}, ""),
        ("anthropic", {"output_config": {"effort": "low"}, "tool_choice": {"type": "auto"}}, ""),
    ],
)
def test_what_changes_the_sampling_or_the_form_is_known_as_such(
    interface: str, body: dict[str, Any], name: str
) -> None:
    assert list(unsupported(READERS[interface](body).sampling, None)) == ([name] if name else [])


@pytest.mark.parametrize(
    "interface, body, reason",
    [
        ("responses", {"previous_response_id": []}, "previous_response_id"),
        *[(name, {"model": "a\ud800"}, "model: expected text") for name in READERS],
        ("chat", {"stop": "\ud800"}, "stop: expected text"),
        ("chat", {"messages": BEGUN}, "the last one of the user"),
        ("anthropic", {"messages": BEGUN}, "the last one of the user"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    interface: str, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        asyncio.run(AgentSession().ask(READERS[interface](body), "", False, here()))
    assert refused.value.status == 400


def test_calls_are_recognised_however_their_numbers_and_arguments_are_written() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        calls = [{"id": "1", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    history = SaidHistory()
    said = chat.read_message(call('{"x": 1.0, "y": [true, 0.5]}'))
    assert said["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": [True, 0.5]}
    history.record(history.find(ModelRequest([USER])).place, 0, "said", [said])
    for arguments in ({"x": 1.0, "y": [True, 0.5]}, '{"x": 1, "y": [true, 0.5]}'):
        messages = [USER, chat.read_message(call(arguments)), USER]
        assert history.find(ModelRequest(messages)).after == 0, json.dumps(arguments)


def test_a_response_whose_call_the_agent_removed_reads_as_the_agent_has_it() -> None:
    async def scenario(session: AgentSession, ended: asyncio.Future[None]) -> None:
        tools = [{"type": "function", "function": {"name": "look"}}]
        kept = {"role": "assistant", "content": "Sure."}
        for messages in ([USER], [USER, kept, USER]):
            request = ModelRequest(messages, tools=tools)
            reply = asyncio.ensure_future(session.ask(request, "name", False, here()))
            await asyncio.sleep(0)
            step = await session.next(ended)
            assert step is not None and step.observation == messages and step.after == -1
            told(session, 'Sure. <tool_call>{"name": "look"}</tool_call>')
            assert (await reply).content == "Sure."

    in_a_loop(scenario)


def test_instructions_are_no_part_of_what_a_response_hands_on() -> None:
    before: dict[str, list[dict[str, Any]]] = {}

    def asked(content: str, **more: Any) -> ModelRequest:
        given = [{"role": "developer", "content": content}]
        return openai_responses.read({"input": given, **more}, before)

    first = asked("rule", instructions="old")
    before["0"] = first.messages[first.handed_on :]
    for instructions in (["new"], []):
        told = asked("more", previous_response_id="resp_0", instructions="".join(instructions))
        assert [one["content"] for one in told.messages] == [*instructions, "rule", "more"]


def test_metrics_that_agents_post_have_few_short_names() -> None:
    """Of all episodes of an endpoint together: each would be a column of the run's files."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    endpoint = Endpoint()

    async def post(metrics: Any) -> int:
        session = AgentSession()
        url = endpoint.open(session)
        transport = httpx.ASGITransport(endpoint.application)
        async with httpx.AsyncClient(transport=transport) as client:
            answer = await client.post(f"{url}/reward", json={"reward": 1, "metrics": metrics})
        assert (session.posted is None) == (answer.status_code == 400)
        assert answer.text.isprintable()
        return int(answer.status_code)

    async def run() -> None:
        assert await post({"calls": 2, "share": 0.5}) == 200
        for wrong in ({"\x1b[2J": 1}, {"x" * 200: 1}, {"": 1}, {"a": 10**400}, {"a": True}):
            assert await post(wrong) == 400
        assert await post({f"m{number}": 1 for number in range(3_000)}) == 400
        answers = [await post({f"m{number}": 1}) for number in range(300)]
        assert answers.count(200) == 198 and answers[-1] == 400
        assert await post({"calls": 3}) == 200

    asyncio.run(run())
