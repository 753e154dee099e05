"""What the asearcher demo is made of: a world whose facts stand on pages, and demonstrations that open them."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from recipes.asearcher.warm_up import HASTY
from rlflow.rollout import Tokenizer
from rlflow_environments.retrieval.corpus import Corpus, Passage, write_pages, write_rows
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.environment import SearchEnvironment
from rlflow_environments.search.world.demonstrations import Demonstration, Slips, demonstrate
from rlflow_environments.search.world.world import ensure_world
from tests.unit.environments.retrieval.search_corpora import read_pages
from tests.unit.environments.search.search_agents import converse, roll_out

DOCUMENT = re.compile(r"\[Doc \d+\]\((\S+)\):\n(.+?)(?=\n\n\[Doc |\n</information>)", re.DOTALL)
PAGE = re.compile(r">>>> Page 1 >>>>\n\n(.+)\n</information>", re.DOTALL)
ACCESS = re.compile(r"<access> (\S+)</access>")
COUNT = 60


class Replayed(Retriever):
    """Finds what a demonstration was shown, search by search."""

    def __init__(self, results: list[list[Passage]]) -> None:
        self.results = results

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        return [self.results.pop(0) for _ in queries]


def environment_of(shown: Demonstration, folder: Path, gold: str) -> SearchEnvironment:
    """The real environment, with the results and pages that the demonstration says."""
    found = [
        DOCUMENT.findall(str(step.full)) for response, step in shown.turns if "<search>" in response
    ]
    results = [[Passage(url, url, contents, url) for url, contents in search] for search in found]
    pages = {"world://0/nothing": "Nothing."}
    for response, step in shown.turns:
        if opened := ACCESS.search(response):
            page = PAGE.search(str(step.full))
            assert page is not None
            pages[opened[1]] = page[1]
    folder.mkdir(exist_ok=True)
    train = write_rows(folder / "rows.jsonl", [{"prompt": shown.prompt, "solutions": [gold]}])
    return SearchEnvironment(
        train=train, retriever=Replayed(results), protocol="asearcher", tools=["search", "access"],
        pages=write_pages(folder / "pages.jsonl", pages), reward="asearcher_compat",
    )  # fmt: skip


def last_words(shown: Demonstration) -> str:
    found = re.search(r"<answer>(.*)</answer>", shown.turns[-1][0])
    assert found is not None
    return found[1].strip()


def test_the_environment_answers_a_demonstration_as_it_says(tmp_path: Path) -> None:
    turns = set()
    for number in range(COUNT):
        shown = demonstrate(random.Random(number), pages=True)
        steps = converse(
            environment_of(shown, tmp_path, last_words(shown)),
            [response for response, _ in shown.turns],
        )
        assert [step.observation for step in steps[:-1]] == [
            step.full for _, step in shown.turns[:-1]
        ]
        assert (
            steps[-1].terminated
            and steps[-1].reward == 1.0
            and steps[-1].metrics["invalid_actions"] == 0
        )
        assert steps[-1].metrics["accesses"] == steps[-1].metrics["searches"]
        turns.add(len(steps))
    assert turns == {5, 9}  # one look-up, and two


def test_the_segments_are_those_of_a_rollout(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    for number in range(4):
        shown = demonstrate(random.Random(number), pages=True)
        environment = environment_of(shown, tmp_path, "x")
        trajectory, _ = roll_out(environment, tokenizer, [response for response, _ in shown.turns])
        assert len(trajectory.segments) == len(shown.segments())
        for segment, parts in zip(trajectory.segments, shown.segments(), strict=True):
            assert tokenizer.decode(segment.tokens.tolist()) == "".join(text for text, _ in parts)
            written = "".join(text for text, mine in parts if mine)
            assert tokenizer.decode(segment.tokens[segment.loss_mask].tolist()) == written


@pytest.mark.parametrize("kind, accesses", [("guess", {0}), ("early", {0}), ("give_up", {1})])
def test_each_kind_of_haste_is_what_its_name_says(
    kind: str, accesses: set[int], tmp_path: Path
) -> None:
    seen = set()
    for number in range(COUNT // 2):
        shown = demonstrate(random.Random(number), Slips(**{kind: 1.0}), pages=True)
        steps = converse(
            environment_of(shown, tmp_path, "x"), [response for response, _ in shown.turns]
        )
        assert steps[-1].terminated and steps[-1].metrics["invalid_actions"] == 0
        seen.add(int(steps[-1].metrics["accesses"]))
    assert seen == accesses


def test_hasty_demonstrations_sometimes_go_all_the_way() -> None:
    turns = [
        len(demonstrate(random.Random(number), HASTY, pages=True).turns) for number in range(300)
    ]
    assert 0.1 < sum(count in (5, 9) for count in turns) / len(turns) < 0.75


def test_in_a_world_of_excerpts_only_pages_have_all_facts(tmp_path: Path) -> None:
    world = ensure_world(tmp_path, train_questions=20, val_questions=10, size=0.1, excerpts=True)
    whole = ensure_world(tmp_path, train_questions=20, val_questions=10, size=0.1)
    assert world["pages"].read_bytes() == whole["pages"].read_bytes()
    pages = read_pages(world["pages"])
    for excerpt, passage in zip(Corpus(world["corpus"]), Corpus(whole["corpus"]), strict=True):
        assert passage.body.startswith(excerpt.body) and excerpt.body.count(". ") == 0
        assert passage.body in pages[excerpt.url]


def test_a_managed_service_has_the_pages_of_the_world(tmp_path: Path) -> None:
    world = {
        "directory": str(tmp_path),
        "train_questions": 20,
        "val_questions": 10,
        "size": 0.1,
        "excerpts": True,
    }
    environment = SearchEnvironment(
        world=world,
        retriever="bm25",
        managed=True,
        protocol="asearcher",
        tools=["search", "access"],
    )
    try:
        url, page = next(iter(read_pages(ensure_world(**world)["pages"]).items()))

        async def opened() -> str:
            episode = await environment.reset(environment.tasks("train")[0])
            return str(
                (
                    await environment.step(episode, f"<think>x</think><access> {url}</access>")
                ).observation
            )

        assert (
            asyncio.run(opened())
            == f"\n\n<information>\n>>>> Page 1 >>>>\n\n{page}\n</information>\n<think>\n"
        )
    finally:
        environment.shutdown()
