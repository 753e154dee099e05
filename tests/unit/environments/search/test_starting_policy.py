"""What the starting policy is made of: its tokenizer, the demonstrations that it is shown, and the circuit it starts with."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from rlflow_tools.kit.imitation import to_trajectory

from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.models.tiny import write_random_model, write_tokenizer
from rlflow.rollout import Rollout, Tokenizer
from rlflow.trainer.base import Trainer
from rlflow.types import Episode, Step, Task
from rlflow_environments.retrieval.corpus import Passage, make_contents, write_rows
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.environment import SearchEnvironment
from rlflow_environments.search.protocols.text import parse_action
from rlflow_environments.search.world.demonstrations import (
    Demonstration,
    Slips,
    demonstrate,
    repeated_names,
)
from rlflow_environments.search.world.prose import RELATIONS, syllables
from rlflow_environments.search.world.warm_up import (
    LEARNED_ON,
    TAGS,
    VOCABULARY,
    Curriculum,
    tokenizer_texts,
)
from tests.unit.environments.search.search_solver import answers, read_facts
from tests.unit.environments.search.test_world import pool_by_word, pools_in

DOCUMENT = re.compile(r'Doc \d+\(Title: "(.+?)"\) (.+?)(?=\nDoc |</information>)')
COUNT = 150
SHIPPED = Path(__file__).parents[4] / "recipes" / "searchr1" / "starting_policy"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the warm-up starts from."""
    directory = tmp_path_factory.mktemp("policy")
    write_tokenizer(
        directory, tokenizer_texts(), vocabulary=VOCABULARY, tags=TAGS, learned_on=LEARNED_ON
    )
    write_random_model(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(policy)


# ---------------------------------------------------------------- the tokenizer


def test_the_shipped_tokenizer_is_what_the_warm_up_makes(policy: Path) -> None:
    assert (SHIPPED / "tokenizer.json").read_text() == (policy / "tokenizer.json").read_text()


def test_every_name_is_two_tokens_per_word_one_for_each_syllable(tokenizer: Tokenizer) -> None:
    first, last = syllables()
    words = sorted(pool_by_word())
    ids = tokenizer.inner([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    assert {len(tokens) for tokens in ids} == {2}
    assert len({tokens[0] for tokens in ids}) == len(first) and len(
        {tokens[1] for tokens in ids}
    ) == len(last)


@pytest.mark.parametrize(
    "context",
    [" {}", "<search> {} birthplace</search>", "<answer> {}</answer>", "to {}.", "in {}, where", "of {}?", "a {} River", " {}'s"],
)  # fmt: skip
def test_a_name_is_the_same_two_tokens_wherever_it_follows_a_space(
    context: str, tokenizer: Tokenizer
) -> None:
    for word in random.Random(0).sample(sorted(pool_by_word()), 300):
        alone = tokenizer.encode(f" {word}")
        before, after = context.split(" {}")
        assert tokenizer.encode(context.format(word)) == [
            *tokenizer.encode(before),
            *alone,
            *tokenizer.encode(after),
        ]


def test_tokenizing_loses_nothing_and_tags_are_single_tokens(tokenizer: Tokenizer) -> None:
    for text in _texts(40):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for tag in ("think", "search", "information", "answer"):
        assert len(tokenizer.encode(f"<{tag}>")) == len(tokenizer.encode(f"</{tag}>")) == 1
    odd = "naïve — 日本\t<|endoftext|\n\n  x"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


def test_a_whole_demonstration_fits_the_demos_token_budget(tokenizer: Tokenizer) -> None:
    assert max(len(tokenizer.encode(text)) for text in _texts(COUNT)) < 1024


def _texts(count: int) -> list[str]:
    shown = (demonstrate(random.Random(number)) for number in range(count))
    return ["".join(text for text, _ in trace.segments()[0]) for trace in shown]


# ---------------------------------------------------------------- demonstrations


def test_demonstrations_ask_for_every_relation() -> None:
    """In one question of fifty at least, as the one that is asked for and as the first to look up."""
    first, last, count = Counter[str](), Counter[str](), 1000
    for number in range(count):
        responses = "".join(response for response, _ in demonstrate(random.Random(number)).turns)
        wanted = re.findall(r"(?:I need|Next) the (\w+)\.", responses)
        first[wanted[0]] += 1
        last[wanted[-1]] += 1
    for counts in (first, last):
        assert set(counts) == {relation.keyword for relation in RELATIONS.values()}
        assert min(counts.values()) >= count / 50, counts


class Shown(Retriever):
    """Gives the passages that a demonstration shows, search by search."""

    def __init__(self) -> None:
        self.results: list[list[Passage]] = []

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        return [self.results.pop(0) for _ in queries]


def played(shown: Demonstration, directory: Path) -> dict[str, float]:
    """The metrics of the episode when the real environment is given the demonstration's responses.

    Its gold answer is what a reader of the shown passages finds; the environment must answer as the demonstration says."""
    question = shown.prompt.removeprefix("Question: ").strip()
    pages = [DOCUMENT.findall(str(step.full)) for _, step in shown.turns[:-1]]
    golds = answers(question, read_facts(dict(page for search in pages for page in search))) or {
        "unknown"
    }
    assert len(golds) == 1
    row = {"prompt": shown.prompt, "solutions": sorted(golds)}
    retriever = Shown()
    retriever.results = [
        [Passage(t, t, make_contents(t, text), "") for t, text in search] for search in pages
    ]
    environment = SearchEnvironment(
        train=write_rows(directory / "rows.jsonl", [row]), retriever=retriever
    )

    async def play() -> Step:
        episode = await environment.reset(environment.tasks("train")[0])
        assert episode.task.prompt == shown.prompt
        for response, expected in shown.turns:
            episode.turns += 1
            step = await environment.step(episode, response)
            assert step.observation == expected.full
        return step

    step = asyncio.run(play())
    assert step.terminated
    return {**step.metrics, "reward": step.reward}


def test_a_skilful_demonstration_scores_one_in_the_real_environment(tmp_path: Path) -> None:
    hops = []
    for number in range(COUNT):
        metrics = played(demonstrate(random.Random(number)), tmp_path)
        assert metrics["reward"] == metrics["exact_match"] == 1 and metrics["invalid_actions"] == 0
        hops.append(metrics["searches"])
    assert set(hops) == {1.0, 2.0} and 0.25 < hops.count(1.0) / COUNT < 0.45


def test_clumsy_demonstrations_keep_the_protocol_and_mostly_fail(tmp_path: Path) -> None:
    clumsiness = Curriculum().clumsiness
    scores = []
    for number in range(COUNT):
        shown = demonstrate(random.Random(number), clumsiness)
        actions = [parse_action(response) for response, _ in shown.turns]
        assert [action and action.kind for action in actions] == ["search"] * (len(actions) - 1) + [
            "answer"
        ]
        metrics = played(shown, tmp_path)
        assert metrics["invalid_actions"] == 0
        scores.append(metrics["exact_match"])
    assert 0.1 < sum(scores) / COUNT < 0.6


@pytest.mark.parametrize("kind, searches", [("guess", {0}), ("early", {1, 2, 3}), ("give_up", {1})])
def test_each_kind_of_clumsiness_is_what_its_name_says(kind: str, searches: set[int]) -> None:
    seen = set()
    for number in range(60):
        skilful, clumsy = (
            demonstrate(random.Random(number), Slips(**chosen)) for chosen in ({}, {kind: 1.0})
        )
        assert clumsy.prompt == skilful.prompt
        if kind == "give_up" and len(skilful.turns) < 3:
            continue
        seen.add(len(clumsy.turns) - 1)
        if kind == "early":
            assert not names_in(clumsy.turns[0][0])
        if kind == "give_up":
            assert names_in(clumsy.turns[0][0]) and clumsy.turns[0] == skilful.turns[0]
    assert seen <= searches and seen


def names_in(text: str) -> list[str]:
    return [
        word for word in re.findall(r"\b[A-Z][a-z]{4,6}\b", text) if word in pool_by_word()
    ] or re.findall("The [A-Z]", text)


def test_the_warm_up_never_sees_a_name_of_the_validation_questions() -> None:
    curriculum = Curriculum()
    for number in range(400):
        text = "".join(part for part, _ in curriculum.row(random.Random(number), number / 400))
        assert pools_in(text) <= {"train"}


def test_warm_up_rows_are_tokenized_part_by_part_and_know_what_the_policy_wrote(
    tokenizer: Tokenizer,
) -> None:
    curriculum = Curriculum()
    for number in range(60):
        parts = curriculum.row(random.Random(number), number / 60)
        segment = to_trajectory(parts, tokenizer.encode, repeats=True).segments[0]
        assert tokenizer.decode(segment.tokens.tolist()) == "".join(text for text, _ in parts)
        written = segment.versions >= 0
        assert tokenizer.decode(segment.tokens[written].tolist()) == "".join(
            text for text, sampled in parts if sampled
        )
        assert bool(segment.loss_mask[written].all())
        # What is trained beside that was said before in the row, its predecessor included.
        pairs = list(itertools.pairwise(segment.tokens.tolist()))
        for position in (segment.loss_mask & ~written).nonzero()[:, 0].tolist():
            assert pairs[position - 1] in pairs[: position - 1]


# ---------------------------------------------------------------- the model


def second_syllables(policy: Path, tokenizer: Tokenizer, *, context: bool) -> tuple[float, float]:
    """Mean log-probs (nats) of (second, first) syllables of names said again, after they were said once or without that."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    found: dict[int, list[float]] = {0: [], 1: []}
    endings = {tokenizer.encode(f" {syllables()[0][0]}{ending}")[1] for ending in syllables()[1]}
    for number in range(20):
        once, again = repeated_names(random.Random(number))
        seen: set[tuple[int, int]] = set()
        before, names = tokenizer.encode(once if context else " "), tokenizer.encode(again)
        with torch.no_grad():
            logprobs = model(torch.tensor([before + names])).logits[0].log_softmax(-1)
        for position, token in enumerate(names, start=len(before)):
            if (pair := (names[position - len(before) - 1], token)) in seen:
                continue  # said twice here, so it can be copied in any case
            seen.add(pair)
            found[int(token in endings)].append(float(logprobs[position - 1, token]))
    return sum(found[1]) / len(found[1]), sum(found[0]) / len(found[0])


def test_the_untrained_model_copies_the_second_syllable_of_a_name_that_it_has_read(
    policy: Path, tokenizer: Tokenizer
) -> None:
    """A second syllable by chance is one of 200 endings: -5.3 nats, if all else about the language were known already. First
    syllables, which nothing foretells, stay at the level of a random model: about -log of the vocabulary, -7.3 nats."""
    second, first = second_syllables(policy, tokenizer, context=True)
    assert second > -math.log(200) + 2 and second > first + 3
    unread, _ = second_syllables(policy, tokenizer, context=False)
    assert second > unread + 2


class TwoTurns(Environment):
    stop = ("<", ".")

    def tasks(self, split: str) -> list[Task]:
        return [Task(str(number), demonstrate(random.Random(number)).prompt) for number in range(6)]

    async def step(self, episode: Episode, response: str) -> Step:
        return Step("<information>" + "".join(_texts(2))[:400], terminated=episode.turns == 2)


@pytest.mark.parametrize("sharpened", [1.0, 3.0])
def test_megatron_the_engine_and_transformers_agree_on_this_model(
    policy: Path, sharpened: float, tmp_path: Path
) -> None:
    """Also where the attention is sharper than at the start, as after training: its large biases and key-query products are
    where implementations drift apart."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(sharpened)
    model.save_pretrained(tmp_path)
    for file in policy.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    environment = TwoTurns()
    with Rollout.from_pretrained(
        tmp_path, environment, max_response_tokens=40, max_turns=2, samples_per_prompt=2
    ) as rollout:
        groups = rollout.collect(environment.tasks("train"))
    batch = make_batch([trajectory for group in groups for trajectory in group.usable])
    assert int(batch.loss_mask.sum()) > 200
    trainer = Trainer.from_pretrained(tmp_path)
    scores = trainer.score(batch)["logprobs"]
    trainer.close()
    assert float((scores - batch.logprobs)[batch.loss_mask].abs().max()) < 1e-4
    with torch.no_grad():
        logprobs = model(batch.tokens).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    inside = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    assert float((scores[:, 1:] - expected)[inside].abs().max()) < 1e-4
