"""Claims about page access: chunks that are read once, in their order, and what is trained of the rewritten contexts."""

from __future__ import annotations

import pytest
from fixtures import tiny_tokenizer

from rlflow.algorithms.aggregates.means import trajectory_mean
from rlflow.batching import make_batch
from rlflow.errors import ConfigError
from rlflow.rollout import Tokenizer
from rlflow.types import StopReason
from rlflow_environments.retrieval.corpus import write_pages, write_rows
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.protocols.asearcher import page_chunks
from tests.unit.environments.search.search_agents import Shelf, converse, roll_out

ALPHA = "The tower is in Paris."
ASKS = "<think>t</think><search> Alpha </search>"
PAGE = "".join(f"{number:05d}" for number in range(12_000))  # 60,000 characters: three chunks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def make(tmp_path):
    """An environment of the asearcher protocol over one question, one document and two pages."""

    def made(**options) -> SearchEnvironment:
        train = write_rows(
            tmp_path / "train.jsonl", [{"question": "where is the tower", "solutions": ["Paris"]}]
        )
        pages = write_pages(
            tmp_path / "pages.jsonl", {"http://p": PAGE, "http://w/index.php?title=Q": "short"}
        )
        given = {
            "retriever": Shelf(Alpha=ALPHA),
            "tools": ["search", "access"],
            "pages": pages,
            **options,
        }
        return SearchEnvironment(train=train, protocol="asearcher", **given)

    return made


def test_a_page_is_at_most_ten_chunks_of_25000_characters():
    chunks = page_chunks("y" * 260_000)
    assert len(chunks) == 10
    assert [chunk.full.count("y") for chunk in chunks] == [25_000] * 10
    assert chunks[1].full.startswith("\n\n<information>\n>>>> Page 2 >>>>\n\ny") and chunks[
        1
    ].full.endswith("y\n</information>\n<think>\n")
    assert {chunk.short.count("y") for chunk in chunks} == {100}
    assert len(page_chunks("y" * 25_000)) == 1 and len(page_chunks("y" * 25_001)) == 2
    assert (
        page_chunks(None) == page_chunks(" ") and "No More Information" in page_chunks(None)[0].full
    )


def test_each_chunk_is_read_once_and_then_gives_way_to_its_beginning(make):
    environment = make()
    opened, second, third, done, answer = converse(
        environment,
        [
            "<access>http://p</access>",
            "a</think>",
            "b</think>",
            "c</think>",
            "<answer>Paris</answer>",
        ],
    )
    chunks = page_chunks(PAGE)
    assert [step.observation for step in (opened, second, third, done)] == [
        *(chunk.full for chunk in chunks),
        "",
    ]
    assert [step.replace for step in (opened, second, third, done)] == [
        None,
        {0: chunks[0].short},
        {1: chunks[1].short},
        {2: chunks[2].short},
    ]
    assert [step.stop for step in (opened, second, third, done)] == [("</think>",)] * 3 + [None]
    assert answer.terminated and answer.reward == 1.0


def test_results_are_read_in_the_order_that_they_were_asked_for(make):
    environment = make()
    steps = converse(
        environment,
        [
            "<access>http://p</access>",
            "<search>Alpha</search></think>",
            "b</think>",
            "c</think>",
            "d</think>",
        ],
    )
    marks = ["Page 1", "Page 2", "Page 3", "[Doc 1]"]
    shown = [next((mark for mark in marks if mark in step.observation), "") for step in steps]
    assert shown == [*marks, ""]


def test_a_search_behind_pages_that_use_up_the_turns_is_not_sent(make):
    shelf = Shelf(Alpha=ALPHA)
    environment = make(retriever=shelf)
    converse(environment, ["<access>http://p</access>", "<search>Alpha</search></think>"], limit=4)
    assert shelf.asked == []
    converse(environment, ["<access>http://p</access>", "<search>Alpha</search></think>"], limit=5)
    assert shelf.asked == ["Alpha"]


def test_a_page_is_found_under_the_other_spelling_of_its_address(make):
    environment = make()
    known, unknown = (
        converse(environment, [f"<access>{url}</access>"])[0]
        for url in ("http://w/index.php/Q", "http://x")
    )
    assert (
        "Page 1 >>>>\n\nshort\n" in known.observation
        and "No More Information" in unknown.observation
    )


def test_every_sampled_token_is_trained_exactly_once_whatever_is_rewritten(make, tokenizer):
    """Overshoot behind stop strings and the end-of-sequence token included; each rewrite starts a segment."""
    environment = make()
    texts = [
        ASKS,
        "read</think>",
        "<access>http://p</access>",
        "a</think>",
        "b</think>",
        "c</think>",
        "no more to say",
    ]
    trajectory, engine = roll_out(environment, tokenizer, texts, overshoot=" \n")
    assert len(trajectory.turns) == 7 and trajectory.stop is StopReason.TERMINATED
    assert len(trajectory.segments) == 4
    trained = [
        (token, logprob)
        for segment in trajectory.segments
        for token, logprob, mine in zip(
            segment.tokens.tolist(),
            segment.logprobs.tolist(),
            segment.loss_mask.tolist(),
            strict=True,
        )
        if mine
    ]
    assert trained == [(token, -1.0 - number) for number, token in enumerate(engine.sampled)]
    assert (
        engine.sampled[-1] in tokenizer.eos_ids
        and tokenizer.decode(engine.sampled).count("</think> \n") == 4
    )
    for turn, fed in zip(
        trajectory.turns, engine.fed, strict=True
    ):  # what was trained is what was seen
        assert trajectory.segments[turn.segment].tokens[: turn.start].tolist() == fed
    batch = make_batch(
        [trajectory]
    )  # and the trainer sees it so: four rows of one attempt, which weigh one together
    assert len(batch) == 4 and int(batch.loss_mask.sum()) == len(engine.sampled)
    weights = trajectory_mean(batch)
    assert (
        float(weights.sum()) == pytest.approx(1.0)
        and len(set(weights[batch.loss_mask].tolist())) == 1
    )
    last = tokenizer.decode(engine.fed[-1])
    assert [
        last.count(f"Page {number} >>>>\n\n{PAGE[(number - 1) * 25_000 :][:100]}\n</information>")
        for number in (1, 2, 3)
    ] == [1, 1, 1]
    assert max(len(fed) for fed in engine.fed) < 2 * len(tokenizer.encode(PAGE[:25_000]))


def test_a_rewrite_that_nothing_follows_leaves_no_empty_segment(make, tokenizer):
    environment = make(max_turns=3)
    trajectory, _ = roll_out(
        environment, tokenizer, ["<access>http://p</access>", "a</think>", "b</think>"]
    )
    assert len(trajectory.segments) == 2 and all(
        bool(segment.loss_mask.any()) for segment in trajectory.segments
    )


def test_access_without_pages_is_an_error_and_pages_without_access_a_warning(make, caplog):
    with pytest.raises(ConfigError, match=r"environment\.pages"):
        make(pages=None)
    make(tools=["search"])
    assert "the policy is not offered the tool access" in caplog.text
