"""Claims about questions that a model writes: the client's manners against a real HTTP server, and what becomes of replies.

The server is a stand-in for a model: it reads the prompt's passages and answers by rule, or misbehaves as it is told to.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.common.chat_endpoint import ChatEndpoint, EndpointError
from rlflow_environments.search.__main__ import main
from rlflow_environments.search.own_documents.writing import read_reply
from rlflow_environments.search.world.world import make_world

FACT = re.compile(
    r"The (birthplace|teacher|spouse|author|founder|capital) of (.+?) (?:is|was) ([^.]+)\."
    r"|()(.+?) was (?:born in|written by|founded by|married to) ([^.]+)\."
)


class Model:
    """faults: statuses to answer with first. fails_after: requests from then on get a 500. seen: (headers, body)."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.fails_after = 10**9
        self.seen: list[tuple[Message, dict]] = []
        self.url = ""
        self.lock = threading.Lock()

    def answer(self, prompt: str) -> str:
        if "Second passage" in prompt:
            first, second = prompt.split("Second passage, titled ")
            bridge, text = second.split(":\n", 1)
            found = FACT.search(text.split("\n\n")[0])
            title = re.search(r"titled (.+):", first)[1]
            row = {
                "question": f"Which name goes with the one whom {title} names?",
                "answer": (found[3] or found[6]) if found else bridge,
            }
            return f"Here you are:\n```json\n{json.dumps(row)}\n```"
        title, text = re.search(r"titled (.+):\n(.*?)\n\n", prompt, re.DOTALL).groups()
        found = FACT.search(text)
        if not found:
            return "I cannot write a question about this."
        rows = [{"question": f"Which name goes with {title}?", "answer": found[3] or found[6]},
                {"question": f"What is said of {title}?", "answer": "Atlantis"}]  # fmt: skip
        return json.dumps(rows)


@pytest.fixture
def model() -> Iterator[Model]:
    state = Model()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.seen.append((self.headers, body))
                status, headers = state.faults.pop(0) if state.faults else (200, {})
                status = 500 if len(state.seen) > state.fails_after else status
            reply = {
                "choices": [
                    {
                        "message": {
                            "content": state.answer(body["messages"][0]["content"])
                            if status == 200
                            else ""
                        }
                    }
                ]
            }
            data = json.dumps(reply if status == 200 else {"error": "as told"}).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    yield state
    server.shutdown()
    server.server_close()


def single(title: str, name: str) -> str:
    return f"titled {title}:\n{title} was born in {name}.\n\nEach question"


@pytest.fixture
def documents(tmp_path):
    world = make_world(
        3, train_questions=1, val_questions=1, val_share=0.35, prompt_template="short", size=0.03
    )
    folder = tmp_path / "docs"
    folder.mkdir()
    for passage in world["corpus"]:
        (folder / f"{passage.id}.txt").write_text(f"{passage.title}\n\n{passage.body}\n")
    return folder


def test_answers_come_in_the_order_of_the_prompts_and_the_key_is_sent(model):
    endpoint = ChatEndpoint(model.url, "some-model", api_key="secret", concurrency=4)
    names = [f"Name{i}" for i in range(20)]
    answers = endpoint.complete([single("Ann", name) for name in names])
    assert [json.loads(answer)[0]["answer"] for answer in answers] == names
    headers, body = model.seen[0]
    assert (
        headers["authorization"] == "Bearer secret"
        and body["model"] == "some-model"
        and body["temperature"] == 0.0
    )


def test_only_what_may_pass_is_tried_again(model):
    endpoint = ChatEndpoint(model.url, "m", tries=4, pause_s=0.01)
    model.faults = [(500, {}), (429, {"Retry-After": "0.01"}), (503, {})]
    assert "Rome" in endpoint.complete([single("Ann", "Rome")])[0] and len(model.seen) == 4
    model.faults = [(401, {})]
    with pytest.raises(EndpointError, match="status 401"):
        endpoint.complete([single("Ann", "Oslo")])
    assert len(model.seen) == 5
    model.faults = [(500, {})] * 9
    with pytest.raises(EndpointError, match="no answer after 4 attempts; last: status 500"):
        endpoint.complete([single("Ann", "Bern")])
    gone = ChatEndpoint("http://127.0.0.1:9/v1", "m", tries=2, pause_s=0.01)
    with pytest.raises(EndpointError, match="Connection refused"):
        gone.complete(["x"])


def test_answers_that_are_there_are_not_asked_for_again(model, tmp_path):
    prompts = [single("Ann", f"Name{i}") for i in range(12)]
    cache = tmp_path / "answers.jsonl"
    model.fails_after = 5
    with pytest.raises(EndpointError):
        ChatEndpoint(model.url, "m", concurrency=1, tries=1, cache=cache).complete(prompts)
    with cache.open("ab") as file:
        file.write(b'{"key": "cut off by a ki')
    model.fails_after, asked = 10**9, len(model.seen)
    answers = ChatEndpoint(model.url, "m", cache=cache).complete(prompts)
    assert len(model.seen) - asked == 12 - 5
    assert [json.loads(answer)[0]["answer"] for answer in answers] == [
        f"Name{i}" for i in range(12)
    ]
    asked = len(model.seen)
    assert (
        ChatEndpoint(model.url, "m", cache=cache).complete(prompts) == answers
        and len(model.seen) == asked
    )
    ChatEndpoint(model.url, "another", cache=cache).complete(prompts[:1])
    assert len(model.seen) == asked + 1


def test_the_command_asks_screens_and_repeats_itself_without_asking(
    model, documents, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MY_KEY", "secret")
    arguments = ["--endpoint", model.url, "--model", "m", "--api-key-variable", "MY_KEY", "--train", "20", "--val", "4",
                 "--val-share", "0.4"]  # fmt: skip
    assert main(["qa", str(documents), str(tmp_path / "one"), *arguments]) == 0
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert (
        report["dropped"]["not_in_documents"] > 0 and report["dropped"]["unreadable"] > 0
    )  # Atlantis; "I cannot"
    rows = [
        json.loads(line)
        for name in ("train", "val")
        for line in (tmp_path / "one" / f"{name}.jsonl").open()
    ]
    assert rows and Counter(row["made_by"] for row in rows).keys() <= {"model", "model pair"}
    assert "Atlantis" not in {row["solutions"][0] for row in rows}
    assert model.seen[0][0]["authorization"] == "Bearer secret"
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "one").iterdir())
    asked, before = len(model.seen), (tmp_path / "one" / "train.jsonl").read_bytes()
    assert main(["qa", str(documents), str(tmp_path / "one"), *arguments]) == 0
    assert len(model.seen) == asked and (tmp_path / "one" / "train.jsonl").read_bytes() == before
    capsys.readouterr()


def test_an_endpoint_without_a_model_is_refused(tmp_path, documents, capsys):
    assert (
        main(["qa", str(documents), str(tmp_path / "out"), "--endpoint", "http://localhost:1/v1"])
        == 2
    )
    assert "--model NAME is missing" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="expected an address"):
        ChatEndpoint("localhost:8001", "m")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        (
            '[{"question": "Q?", "answer": "A"}, {"question": "R?", "answer": 1912}]',
            [("Q?", "A"), ("R?", "1912")],
        ),
        ('Sure!\n```json\n{"question": " Q? ", "answer": "A"}\n```', [("Q?", "A")]),
        ('[{"question": "Q?"}, {"question": "R?", "answer": true}, "x"]', []),
        (
            '<think>perhaps [{"question"...}]</think>\n{"question": "Q?", "answer": "A"}',
            [("Q?", "A")],
        ),
        ("no JSON", []),
        ('{"question": "cut o', []),
        ("", []),
    ],
)
def test_replies_are_read_or_left_but_never_guessed(text, pairs):
    assert list(read_reply(text)) == pairs
