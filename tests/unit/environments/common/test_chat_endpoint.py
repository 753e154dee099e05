"""Claims about the one client of chat endpoints, which the judge and `rlflow search qa` share."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.common.chat_endpoint import (
    ChatEndpoint,
    EndpointError,
    EndpointRefusedError,
    UnreadableReply,
    UnreadableReplyError,
)
from tests.unit.environments.common.chat_server import ChatServer, completion
from tests.unit.environments.retrieval.search_servers import serving


def read_number(reply: str) -> int:
    try:
        return int(reply)
    except ValueError:
        raise UnreadableReply(f"expected a number, found {reply}") from None


def endpoint(url: str, **options) -> ChatEndpoint:
    return ChatEndpoint(f"{url}/v1", "m", **{"pause_s": 0.001, **options})


def test_a_reply_that_the_reader_refuses_is_asked_for_again_at_once():
    server = ChatServer("seven", "eight", "9")
    with serving(server) as url:
        start = time.monotonic()
        assert endpoint(url, pause_s=60.0).submit("how many?", read_number).result() == 9
    assert time.monotonic() - start < 30 and len(server.requests) == 3


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"[]", b'{"choices": []}'])
def test_a_body_that_is_no_completion_is_a_reply_that_cannot_be_read(body):
    with (
        serving(ChatServer(body, body)) as url,
        pytest.raises(UnreadableReplyError, match="expected a chat completion"),
    ):
        endpoint(url, tries=2).submit("x", str).result()


CUT_THOUGHT = '<think>I could end with "5". Now'


@pytest.mark.parametrize(
    "body",
    [
        completion("5", "length"),
        completion(CUT_THOUGHT),
        completion(f"<think>4</think>{CUT_THOUGHT}"),
    ],
)
def test_a_reply_that_was_cut_off_is_not_read_but_kept_by_complete(body):
    with serving(ChatServer(body, completion("<think>3</think>7"), body)) as url:
        assert endpoint(url).submit("how many?", read_number).result() == 7
        assert endpoint(url).complete(["write"])[0].startswith(("5", "<think>I"))


def test_a_completion_without_text_is_an_empty_reply():
    with serving(ChatServer(completion(None))) as url:
        assert endpoint(url).submit("x", str).result() == ""


def test_the_last_failure_decides_what_the_error_is():
    with (
        serving(ChatServer("no", 500)) as url,
        pytest.raises(EndpointError, match="status 500: busy") as found,
    ):
        endpoint(url, tries=2).submit("x", read_number).result()
    assert not isinstance(found.value, UnreadableReplyError)
    with (
        serving(ChatServer(500, "no")) as url,
        pytest.raises(UnreadableReplyError, match="after 2 attempts"),
    ):
        endpoint(url, tries=2).submit("x", read_number).result()


def test_a_refusal_names_what_to_fix_in_the_users_words():
    server = ChatServer(404)
    with (
        serving(server) as url,
        pytest.raises(EndpointRefusedError, match=r"404: busy\. Fix <url>, <model> or the key in"),
    ):
        endpoint(url, name_of="<{}>".format).submit("x", str).result()
    assert len(server.requests) == 1


def test_a_prompt_that_is_refused_beside_others_fails_alone() -> None:
    with serving(ChatServer(400, "5", 400, "6", 401)) as url:
        client = endpoint(url)
        with pytest.raises(
            EndpointRefusedError, match="400"
        ):  # nothing was answered yet: all may be refused
            client.submit("long", str).result()
        assert client.submit("x", read_number).result() == 5
        with pytest.raises(
            UnreadableReplyError, match=r"status 400: busy, for a prompt of 4 characters\.$"
        ):
            client.submit("long", str).result()
        assert client.submit("x", read_number).result() == 6
        with pytest.raises(EndpointRefusedError, match="401"):
            client.submit("x", str).result()


@pytest.mark.parametrize(
    "options", [{"tries": 0}, {"timeout_s": -1}, {"concurrency": 0}, {"tries": "3"}]
)
def test_numbers_out_of_range_are_named(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"<{name}>: expected a number above 0"):
        endpoint("http://localhost", name_of="<{}>".format, **options)


def test_no_more_requests_are_open_than_allowed_whoever_asks():
    server = ChatServer(delay_s=0.05)
    with serving(server) as url:
        client = endpoint(url, concurrency=3)

        async def ask() -> list[str]:
            return await asyncio.gather(*(client.ask(str(number), str) for number in range(12)))

        assert asyncio.run(ask()) == ["fine"] * 12
        assert client.complete([f"again {number}" for number in range(6)]) == ["fine"] * 6
    assert server.most_in_flight == 3


def test_a_closed_client_drops_what_waits():
    server = ChatServer(delay_s=0.2)
    with serving(server) as url:
        client = endpoint(url, concurrency=1)
        futures = [client.submit(str(number), str) for number in range(5)]
        while not server.requests:
            time.sleep(0.01)
        client.close()
    assert all(future.cancelled() for future in futures[1:])
