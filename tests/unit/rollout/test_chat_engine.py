"""Evaluation over a chat server: what the server is sent, how its replies become responses, and `rlflow eval --server`
from end to end against a small server of the standard library."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlflow.commands import cli
from rlflow.errors import ConfigError
from rlflow.rollout.chat_engine import BEGIN, END, ChatEngine, PiecedText, messages_of, with_stop

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def chat_server(
    answer: Answer, models: tuple[str, ...] = ("tiny",)
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, the requests so far) of a server that answers each request by the function: (status, choice or text)."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({**body, "authorization": self.headers.get("Authorization")})
            status, choice = answer(body)
            self._send(status, {"choices": [choice]} if status == 200 else choice)

        def _send(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def said(text: str, reason: str = "stop", **more: Any) -> tuple[int, Any]:
    return 200, {"message": {"role": "assistant", "content": text}, "finish_reason": reason, **more}


def test_pieces_are_exact_and_marks_in_others_text_are_taken_out() -> None:
    text = PiecedText()
    for sample in ("", "a", "Grüße, 世界 \U0001f600!", "x" * 101):
        assert text.decode(text.encode_text(sample)) == sample
        assert text.decode(text.encode_response(sample)) == sample
    assert text.decode(text.encode_text(f"a{BEGIN}b{END}c"), skip_special_tokens=False) == "abc"


def test_a_conversation_is_recognised_in_what_the_rollout_has_of_it() -> None:
    text = PiecedText()
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    tokens = [*text.encode_prompt(prompt), *text.encode_response("<search>x</search>"), *text.encode_text("found: y"),
              *text.encode_response(""), *text.encode_prompt([{"role": "tool", "content": "z"}])]  # fmt: skip
    assert messages_of(text.decode(tokens, skip_special_tokens=False)) == [
        *prompt,
        {"role": "assistant", "content": "<search>x</search>"},
        {"role": "user", "content": "found: y"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "z"},
    ]


@pytest.mark.parametrize(
    ("text", "told", "expected"),
    [
        (
            "<think>a</think><search>b",
            None,
            "<think>a</think><search>b</search>",
        ),  # servers leave the stop string out
        ("<answer>b", "</answer>", "<answer>b</answer>"),  # vLLM says which
        ("<answer>b</answer>", "</answer>", "<answer>b</answer>"),
        ("<search>b</search>", None, "<search>b</search>"),
        ("<search>b", 151645, "<search>b"),  # vLLM: an end-of-sequence token
        ("I do not know.", None, "I do not know."),
    ],
)
def test_the_stop_string_that_servers_leave_out_is_put_back(
    text: str, told: Any, expected: str
) -> None:
    assert with_stop(text, told, ("</search>", "</answer>")) == expected


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    rows = [
        {"question": f"Who is number {number}?", "answer": f"Me {number}"} for number in range(3)
    ]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"id": str(n), "contents": f'"number {n}"\nMe {n} is number {n}'}) + "\n"
            for n in range(3)
        )
    )
    return ["--env", "search", "--corpus", str(tmp_path / "corpus.jsonl"), f"environment.val={tmp_path}/val.jsonl",
            "environment.retriever=bm25", "environment.top_k=1", "--out", str(tmp_path / "out")]  # fmt: skip


def searches_then_answers(body: dict[str, Any]) -> tuple[int, Any]:
    """Searches for the question's number, then answers with what it was shown; never knows the third."""
    first, last = body["messages"][0]["content"], body["messages"][-1]["content"]
    number = first.rpartition("Who is number ")[2][0]
    if len(body["messages"]) == 1:
        return said(f"<think>?</think><search>number {number}")
    found = last.partition("Me ")[2][:1]
    return said(f"<answer>{'nobody' if number == '2' else f'Me {found}'}</answer>")


def test_a_model_behind_a_server_is_evaluated(
    data: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    option = "rollout.chat_template_options.enable_thinking=false"
    with chat_server(searches_then_answers) as (url, seen):
        assert cli.main(["eval", "--server", url, *data, option]) == 0
    out, err = capsys.readouterr()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (
        summary["eval/exact_match"] == pytest.approx(2 / 3)
        and summary["eval/searches"] == 1.0
        and summary["model"] == url
    )
    assert (
        "warning: a chat server takes and gives text" in err
        and "model: tiny" in err
        and "0.66" in out
    )
    assert len(seen) == 6 and all(request["authorization"] == "Bearer secret" for request in seen)
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in seen)
    later = [request["messages"] for request in seen if len(request["messages"]) > 1]
    assert {tuple(message["role"] for message in messages) for messages in later} == {
        ("user", "assistant", "user")
    }
    assert all(
        messages[1]["content"].endswith("</search>") and "<information>" in messages[2]["content"]
        for messages in later
    )
    episodes = [
        json.loads(line)
        for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert sorted(episode["stop"] for episode in episodes) == ["terminated"] * 3


def test_a_refused_key_is_one_line_at_once(
    data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(lambda body: (401, {"error": "no such key"})) as (url, seen):
        assert cli.main(["eval", "--server", url, *data]) == 2
    said = (
        capsys.readouterr().err.splitlines()
    )  # the server may complain that nobody waited for its answer
    (problem,) = [line for line in said if "status 401" in line]
    assert "--api-key-variable" in problem and len(seen) <= 3


def test_a_conversation_that_the_server_cannot_take_fails_alone(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (
            (400, {"error": "too long"})
            if "number 1" in body["messages"][0]["content"]
            else searches_then_answers(body)
        )

    with chat_server(answer) as (url, _):
        assert cli.main(["eval", "--server", url, *data]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["eval/failed"], summary["eval/attempts"]) == (1.0, 2.0)
    ((reason, count),) = summary["failures"].items()
    assert summary["eval/asked"] == 3.0 and count == 1 and "too long" in reason
    said = capsys.readouterr().out
    assert "1 of 3 FAILED" in said and f"1 FAILED: {reason}" in said


def test_a_model_has_to_be_named_where_the_server_has_several() -> None:
    with chat_server(searches_then_answers, models=("a", "b")) as (url, _):
        with pytest.raises(ConfigError, match="give --server-model; its models: a, b"):
            ChatEngine(url, PiecedText())
        assert ChatEngine(url, PiecedText(), model="b").model == "b"


@pytest.mark.parametrize("arguments", [[], ["--model", "x", "--server", "http://localhost:1"]])
def test_a_model_or_a_server_and_not_both(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *arguments]) == 2
    assert "expected one of --model PATH and --server URL" in capsys.readouterr().err
