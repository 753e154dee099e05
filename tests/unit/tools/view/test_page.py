"""The page of a run's episodes: what is in it, and that nothing from outside becomes HTML."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.view.page import SCALES, write_page
from rlflow_tools.view.recorded import RunFiles

from rlflow.commands import cli
from rlflow.errors import CheckpointError, ConfigError
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.types import StopReason, Trajectory
from tests.unit.tools.view.crafted import (
    SEARCHED,
    attempt,
    forked_run,
    group_of,
    small_run,
    task,
    trained,
    write_evaluation,
    write_frame,
    write_step,
)

HOSTILE = '</script><img src=x onerror="alert(1)">&lt;b&gt;@@INDEX@@ \u2028 \x1b[31m \ud800'


def packed(page: str, name: str) -> Any:
    """What an element of the page holds, read as the browser does."""
    found = re.search(rf'<script type="text/plain" id="{name}">([\w+/=]*)</script>', page)
    assert found, name
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def page_of(path: Path) -> str:
    write_page(RunFiles.open(path), path / "view.html")
    return (path / "view.html").read_text(encoding="utf-8")


def test_the_index_knows_every_group_and_a_chunk_holds_every_token(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    page = page_of(small_run(tmp_path, tokenizer))
    index = packed(page, "index")
    assert [(group["kind"], group["step"], group["task"], group["outcomes"]) for group in index["groups"]] == [
        ("train", 1, "Orvan", "sf"), ("train", 1, "Telmik", "sf"), ("train", 2, "Orvan", "sf"), ("train", 2, "Telmik", "sf"),
        ("eval", 0, "Orvan", "s"), ("eval", 0, "Telmik", "f"), ("eval", 2, "Orvan", "s"), ("eval", 2, "Telmik", "s"),
    ]  # fmt: skip
    assert index["attributes"] == {"hops": [1, 2]}
    group = index["groups"][3]
    data = packed(page, group["chunk"])[group["place"]]
    assert data["answers"] == ["Vasmere"] and data["question"] == "Where was Telmik born?"
    first, second = data["attempts"]
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)
    segment = first["tokens"]["segments"][0]
    start, stop = first["tokens"]["turns"][1][1:]
    assert "".join(segment["texts"][start:stop]) == "<answer>Vasmere</answer>"
    assert segment["ids"][start:stop] == tokenizer.encode("<answer>Vasmere</answer>")
    sampled = sum(segment["runs"][1::2])
    assert sum(segment["runs"]) == len(segment["ids"]) and sampled == sum(
        turn["tokens"] for turn in first["turns"]
    )
    assert set(segment["versions"]) == {1} and segment["gap"] == pytest.approx(
        [1e-6 * SCALES["gap"]] * sampled, abs=1.0
    )
    assert segment["advantages"] == [round(0.5 * SCALES["advantages"])] * sampled


def test_each_segment_of_a_forked_episode_holds_what_was_in_view(tmp_path: Path) -> None:
    page = page_of(forked_run(tmp_path))
    group = packed(page, "index")["groups"][0]
    (found,) = packed(page, group["chunk"])[group["place"]]["attempts"]
    first, second = found["tokens"]["segments"]
    (_, start, _), (at, later, _) = found["tokens"]["turns"]
    assert at == 1 and "".join(first["texts"][start:]) == "<think>\nhm\n</think>\n\nPark."
    seen = "".join(second["texts"][:later])
    assert "Park.<|im_end|>\n<|im_start|>user\nNo.<|im_end|>" in seen and "hm" not in seen
    assert (
        found["metrics"]["forks"] == 1
        and found["observation_tokens"] == found["metrics"]["observation_tokens"]
    )


def hostile_run(path: Path, tokenizer: Tokenizer) -> Path:
    """A run whose texts and names are all markup, control characters and halves of emoji."""
    write_frame(path, [trained(1, gap=2.0)])
    of = task(HOSTILE, HOSTILE, HOSTILE, kind=HOSTILE[:30])
    plain = attempt(tokenizer, task("x"), 0, SEARCHED)
    hostile = Trajectory(
        HOSTILE,
        "g",
        plain.segments,
        plain.turns,
        1.0,
        StopReason.ABORTED,
        {HOSTILE: 1.0},
        prompt=HOSTILE,
        error=HOSTILE,
        id="1",
    )
    for turn in hostile.turns:
        turn.response = turn.observation = HOSTILE
    write_step(path, tokenizer, 1, [group_of(of, [hostile, plain])])
    return path


def test_nothing_from_outside_is_html(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = hostile_run(tmp_path / "<b>run", tokenizer)
    page = page_of(path)

    class Elements(HTMLParser):
        found: list[str] = []

        def handle_starttag(self, tag: str, attributes: Any) -> None:
            source = dict(attributes).get("src") or "data:"
            self.found.append(tag if source.startswith("data:") else f"{tag} {source}")

    reader = Elements()
    reader.feed(page)
    assert "img x" not in reader.found and "onerror" not in page
    assert "<b>run" not in page and "&lt;b&gt;run" in page
    assert (
        reader.found.count("script") == page.count("</script>") == 3
    )  # the index, the script, one chunk


def test_an_aborted_attempt_has_no_reward_in_the_index(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    page = page_of(hostile_run(tmp_path, tokenizer))
    assert [group["rewards"] for group in packed(page, "index")["groups"]] == [[None], [1.0]]


def test_the_page_loads_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    page = page_of(small_run(tmp_path, tokenizer))
    assert not re.search(
        r"https?://|<link[^>]+stylesheet|\bsrc=\"(?!data:)|@import|fetch\(|XMLHttpRequest|innerHTML|insertAdjacent|eval\(",
        page,
    )
    assert "default-src 'none'" in page


def test_a_run_without_episodes_says_what_is_there_and_what_stores_them(tmp_path: Path) -> None:
    write_frame(tmp_path, [trained(1)], "metrics: {trajectories_per_step: 0}\n")
    with pytest.raises(
        ConfigError, match=r"config\.yaml.*metrics\.trajectories_per_step=4.*it is 0 there"
    ) as error:
        write_page(RunFiles.open(tmp_path), tmp_path / "view.html")
    assert "\n" not in str(error.value) and not (tmp_path / "view.html").exists()


def test_episodes_of_a_run_without_tokens_are_shown_as_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_frame(tmp_path, [trained(1)])
    of = task("x")
    write_step(
        tmp_path, tokenizer, 1, [group_of(of, [attempt(tokenizer, of, 0, SEARCHED)])], tokens=False
    )
    page = page_of(tmp_path)
    assert (
        "without tokens" in page
        and "tokens" not in packed(page, "chunk-train-1-0")[0]["attempts"][0]
    )


def test_an_evaluation_folder_and_a_file_of_episodes_have_pages_too(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    of = task("x")
    write_evaluation(tmp_path, 0, [group_of(of, [attempt(tokenizer, of, 0, SEARCHED)])])
    folder = tmp_path / "eval-x"
    folder.mkdir()
    (tmp_path / "evaluations" / "step_000000.jsonl").rename(folder / "trajectories.jsonl")
    for path in (folder, folder / "trajectories.jsonl"):
        content, _ = write_page(RunFiles.open(path), tmp_path / "view.html")
        assert [(group["kind"], group["step"]) for group in content.groups] == [("eval", 0)]


def test_steps_that_the_metrics_do_not_know_are_left_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A run that goes on from step 1 after a kill in step 2 writes step 2 again."""
    small_run(tmp_path, tokenizer)
    lines = RunDirectory(tmp_path).metrics.read_text().splitlines()
    RunDirectory(tmp_path).metrics.write_text("\n".join(lines[:2]) + "\n")
    recorded = RunFiles.open(tmp_path)
    assert sorted(recorded.training) == sorted(recorded.tokens) == [1] and sorted(
        recorded.evaluations
    ) == [0]


def test_damaged_files_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    small_run(tmp_path, tokenizer)
    good = RunDirectory(tmp_path).tokens(1).read_bytes()
    for damaged in (
        b"",
        b"PK\x03\x04",
        good[: len(good) // 2],
        good[:100] + b"\0" * 50 + good[150:],
    ):
        RunDirectory(tmp_path).tokens(1).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step_000001\.npz: damaged"):
            write_page(RunFiles.open(tmp_path), tmp_path / "view.html")
    RunDirectory(tmp_path).tokens(1).write_bytes(good)
    RunDirectory(tmp_path).trajectories(2).write_text("[1]\n")
    with pytest.raises(CheckpointError, match=r"step_000002\.jsonl:1: expected an episode"):
        write_page(RunFiles.open(tmp_path), tmp_path / "view.html")


def test_the_command_writes_the_page_into_the_run(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", str(small_run(tmp_path, tokenizer))]) == 0
    said = capsys.readouterr().out
    assert "12 episodes in 8 groups" in said and "exact match 0.500 → 1.000" in said
    assert (tmp_path / "view.html").is_file() and "view.html" in said
    assert cli.main(["view", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is a directory; expected a file" in capsys.readouterr().err
    (tmp_path / "trajectories.jsonl").write_text("")  # of an evaluation that somebody put there
    assert RunFiles.open(tmp_path).is_run and RunFiles.open(tmp_path).training


def test_a_configuration_is_read_as_a_run_reads_it(tmp_path: Path) -> None:
    run = RunFiles.open(write_frame(tmp_path / "run", [], "run: {name: no}\ntrainer: {lr: 1e-6}\n"))
    assert run.settings == {"run.name": "no", "trainer.lr": 1e-6}
    (run.path / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:2: .* alias"):
        assert RunFiles.open(run.path).config
