"""Claims about intrinsic rewards: labels arrive later, and training goes on without them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow.errors import ConfigError, DataError
from rlflow.report.reductions import reduced
from rlflow_environments.wrappers import annotator as annotating
from rlflow_environments.wrappers.intrinsic import IntrinsicRewards
from tests.unit.environments.common.chat_server import ChatServer, completion
from tests.unit.environments.retrieval.search_servers import serving
from tests.unit.environments.wrappers.small import Rooms, played
from tests.waiting import until

NOWHERE = "http://127.0.0.1:9"


class Labeller(ChatServer):
    """FOO for captions that say room 2; `hold` keeps every answer back."""

    def __init__(self, *script, hold: threading.Event | None = None) -> None:
        super().__init__(*script)
        self.hold = hold

    async def __call__(self, scope, receive, send) -> None:
        while self.hold is not None and not self.hold.is_set():
            self.delay_s = 0.01
            await _pause()
        await super().__call__(scope, receive, send)

    @property
    def captions(self) -> list[str]:
        return [
            body["messages"][0]["content"].split("message ")[1].split(".\n")[0]
            for _, body, _ in self.requests
        ]


async def _pause() -> None:
    await asyncio.sleep(0.01)


def intrinsic(url: str, **options) -> IntrinsicRewards:
    endpoint = {
        "url": f"{url}/v1",
        "model": "m",
        "timeout_s": 2.0,
        "concurrency": 1,
        **options.pop("endpoint", {}),
    }
    return IntrinsicRewards(Rooms(), "Go far.", endpoint=endpoint, **{"retry_s": 0.05, **options})


def test_labels_arrive_later_and_what_was_rewarded_is_not_revised() -> None:
    hold = threading.Event()
    server = Labeller(hold=hold)
    server.reply = "It came closer. FOO"
    with serving(server) as url:
        environment = intrinsic(url, extrinsic=10.0)
        first = played(environment, "on", "on", "out")
        assert [step.reward for step in first] == [0.0, 0.0, 20.0], "nobody waited for a label"
        hold.set()
        until(lambda: environment.report()["intrinsic/labels"] == 2)
        again = played(environment, "on", "stay", "stay", "on out")
        environment.shutdown()
    # 0.4 / N^3 for "room 1" three times and "room 2" once, which ends with 10 * 2
    assert [step.reward for step in again] == pytest.approx([0.4, 0.05, 0.4 / 27, 20.4], abs=1e-6)
    assert [step.rewards["intrinsic"] for step in again] == pytest.approx(
        [1.0, 0.125, 0.037037, 1.0], abs=1e-6
    )
    assert again[-1].rewards["extrinsic"] == 2.0 and again[-1].metrics[
        "intrinsic_return"
    ] == pytest.approx(2.162037, abs=1e-6)
    assert len(server.requests) == 2, "a caption is asked about once"


def test_the_newest_questions_are_asked_first_and_the_oldest_dropped() -> None:
    hold = threading.Event()
    server = Labeller(hold=hold)
    with serving(server) as url:
        environment = intrinsic(url, batch=2, most_waiting=3)
        note = environment._annotator
        note.offer([("first",)])
        until(lambda: note.waiting == 0)  # it is being asked
        for caption in ("a", "b", "c", "c", "b", "d"):
            note.offer([(caption,)])
        assert (note.waiting, note.dropped) == (3, 1)
        hold.set()
        until(lambda: note.labelled == 4)
        environment.shutdown()
    assert server.captions == ['"first"', '"d"', '"c"', '"b"']


@pytest.mark.parametrize(
    "script", [(500, 500, 500), (b"<html>", completion(None), b"{")], ids=["dying", "garbage"]
)
def test_an_endpoint_that_fails_is_told_of_once_and_asked_again(script, caplog) -> None:
    server = Labeller(*script)
    server.reply = "FOO"
    with serving(server) as url, caplog.at_level(logging.WARNING):
        environment = intrinsic(url)
        failed = 0.0

        def labelled() -> bool:
            nonlocal failed
            report = environment.report()
            failed += report["intrinsic/failed"]
            return report["intrinsic/labels"] == 1

        assert played(environment, "on")[0].reward == 0.0
        until(labelled)
        assert played(environment, "on")[0].rewards["intrinsic"] == (
            0.0 if completion(None) in script else 1.0
        )
        environment.shutdown()
    assert sum("the annotator gives no labels" in record.message for record in caplog.records) == 1
    assert failed == (1 if completion(None) in script else 3), "an empty reply is the label 0"


def test_with_a_dead_endpoint_training_goes_on_and_ends(caplog) -> None:
    environment = intrinsic(NOWHERE)
    start = time.monotonic()
    for _ in range(20):
        steps = played(environment, "on", "on", "out")
        assert [step.rewards["intrinsic"] for step in steps] == [0.0, 0.0, 0.0]
    until(lambda: environment.report()["intrinsic/failed"] > 0)
    environment.shutdown()
    assert time.monotonic() - start < 10


def test_a_slow_endpoint_keeps_nobody_from_ending() -> None:
    with serving(ChatServer(delay_s=30.0)) as url:
        environment = intrinsic(url, endpoint={"timeout_s": 0.2})
        played(environment, "on")
        start = time.monotonic()
        environment.shutdown()
    assert time.monotonic() - start < 5


def test_an_end_just_as_questions_are_asked_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the thread that asks: between its taking of questions and its asking the endpoint may be closed."""
    with serving(ChatServer()) as url:
        environment = intrinsic(url)
        note = environment._annotator
        ask, ends = note._model.ask, []

        def closing(*arguments: str) -> str:
            ends.append(threading.Thread(target=environment.shutdown))
            ends[-1].start()
            time.sleep(0.3)  # the end comes now, or is held back
            return ask(*arguments)

        monkeypatch.setattr(note._model, "ask", closing)
        note.offer([("a",)])
        until(lambda: ends)
        ends[0].join(5)
        assert not ends[0].is_alive()


@pytest.mark.parametrize("model", ["retrieval", "classifier"])
def test_labels_and_model_are_kept_for_the_next_run(tmp_path: Path, model: str) -> None:
    kept = tmp_path / "state" / "labels.pt"
    server = ChatServer(reply="FOO")
    learning = {"name": model, "lr": 0.01} if model != "retrieval" else model
    with serving(server) as url:
        first = intrinsic(url, state=str(kept), model=learning)
        played(first, "on", "on")
        until(lambda: first.report()["intrinsic/labels"] == 2)
        first.shutdown()
        second = intrinsic(NOWHERE, state=str(kept), model=learning)
        assert [step.rewards["intrinsic"] for step in played(second, "on", "on")] == [1.0, 1.0]
        second.shutdown()
        with pytest.raises(DataError, match=r"found those for .*'goal': 'Go far.'"):
            IntrinsicRewards(Rooms(), "Stay.", endpoint={"url": url, "model": "m"}, state=str(kept))
    assert not [path for path in kept.parent.iterdir() if path != kept], (
        "nothing half written is left"
    )


def test_rollout_workers_keep_each_others_labels(tmp_path: Path) -> None:
    kept = tmp_path / "labels.pt"
    with serving(ChatServer(reply="FOO")) as url:
        workers = [intrinsic(url, state=str(kept)) for _ in range(3)]
        for number, worker in enumerate(workers):
            worker._annotator.offer([(f"room {number}",), ("everywhere",)])
            until(lambda worker=worker: worker.report()["intrinsic/labels"] >= 2)
        for worker in workers:
            worker.shutdown()
    after = intrinsic(NOWHERE, state=str(kept))
    assert after.report()["intrinsic/labels"] == 4
    after.shutdown()


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "labels.pt"
    for content in (b"", b"{}", b"\x80\x02cposix\nsystem\n"):
        kept.write_bytes(content)
        with pytest.raises(DataError, match="expected the state of an annotator"):
            intrinsic(NOWHERE, state=str(kept))


def test_a_state_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(annotating, "SAVE_S", -1.0)
    (tmp_path / "file").write_text("")
    with serving(ChatServer(reply="FOO")) as url:
        environment = intrinsic(url, state=str(tmp_path / "file" / "labels.pt"))
        played(environment, "on")
        until(lambda: environment.report()["intrinsic/labels"] == 1)
        until(lambda: "cannot be kept" in caplog.text)
        environment.shutdown()


def test_the_caption_is_the_first_lines_of_the_observation() -> None:
    environment = intrinsic(NOWHERE, lines=1)
    assert environment.caption("  You see a key. \n@ . .\n") == "You see a key."
    assert len(environment.caption("x" * 10_000)) == 500 and environment.caption(" \n") == ""


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"environment.model: unknown name 'rank'.*Did you mean 'ranking'"
    ):
        intrinsic(NOWHERE, model="rank")
    with pytest.raises(ConfigError, match=r"environment.endpoint: unknown keyword 'tokens'"):
        intrinsic(NOWHERE, endpoint={"tokens": 3})


def test_it_keeps_the_contract() -> None:
    environment = intrinsic(NOWHERE)
    report = check_environment(environment, episodes=4)
    environment.shutdown()
    assert report.passed, str(report)


def test_counts_of_workers_are_added() -> None:
    counts = {name: 2.0 for name in IntrinsicRewards.metrics if "/" in name}
    assert reduced([counts, counts], IntrinsicRewards.metrics) == dict.fromkeys(counts, 4.0)
