"""A fictional encyclopedia, deterministic by seed: people, towns, rivers, countries, works and
companies, with questions.

The world has two halves that do not mention each other: one for training questions and one for
validation questions, named from the two pools of `names.py`. Passages of both halves make one
corpus.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlflow.errors import ConfigError
from rlflow.storage.files import replacing_directory
from rlflow_environments.retrieval.corpus import (
    Passage,
    make_contents,
    write_corpus,
    write_pages,
    write_rows,
)
from rlflow_environments.search.protocols.text import render_prompt
from rlflow_environments.search.world.articles import Entity, Half, article, make_half, titles
from rlflow_environments.search.world.prose import COMPARISONS, RELATIONS

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fact = tuple[str, str, str]
"""(subject, relation, object)"""

COUNTS: Mapping[str, int] = {
    "country": 40,
    "river": 220,
    "city": 420,
    "person": 900,
    "work": 500,
    "company": 340,
}
SHARES: Mapping[str, float] = {"one_hop": 0.42, "two_hop": 0.53, "comparison": 0.05}
DRAWS_PER_QUESTION = 100
FILES = {
    "corpus": "corpus.jsonl",
    "pages": "pages.jsonl",
    "train": "train.jsonl",
    "val": "val.jsonl",
}


@dataclass(frozen=True)
class Question:
    """chain: the facts (subject, relation, object) to look up, in order. kind: one_hop, two_hop or
    comparison."""

    text: str
    answer: str
    kind: str
    chain: tuple[Fact, ...]

    @property
    def entities(self) -> set[str]:
        return {name for subject, _, object_ in self.chain for name in (subject, object_)}


def one_hop_questions(half: Half, generator: random.Random) -> Iterator[Question]:
    """Every fact of the half as a question, phrased at random; the relations take turns, so that
    all are asked for alike."""
    facts: dict[str, list[Fact]] = {}
    for entity in half.values():
        for relation, object_ in entity.facts.items():
            facts.setdefault(relation, []).append((entity.name, relation, object_))
    for fact in _in_turns(facts, generator):
        yield Question(_asked(generator, fact[1], _the(fact[0])), fact[2], "one_hop", (fact,))


def two_hop_questions(half: Half, generator: random.Random) -> Iterator[Question]:
    """Every pair of facts that share their middle, e.g. author then birthplace; the pairs of
    relations take turns."""
    chains: dict[str, list[tuple[Fact, Fact]]] = {}
    for entity in half.values():
        for first, bridge in entity.facts.items():
            if not RELATIONS[first].descriptions or bridge not in half:
                continue
            for second, answer in half[bridge].facts.items():
                if answer not in (entity.name, bridge):
                    chain = ((entity.name, first, bridge), (bridge, second, answer))
                    chains.setdefault(f"{first} {second}", []).append(chain)
    for chain in _in_turns(chains, generator):
        (subject, first, _), (_, second, answer) = chain
        described = generator.choice(RELATIONS[first].descriptions).format(s=_the(subject))
        yield Question(_asked(generator, second, described), answer, "two_hop", chain)


def _asked(generator: random.Random, relation: str, subject: str) -> str:
    return generator.choice(RELATIONS[relation].questions).format(s=subject)


def _in_turns(groups: Mapping[str, list[T]], generator: random.Random) -> Iterator[T]:
    """The members of all groups, each group shuffled: one of each group in random order, then the
    next of each, and so on."""
    for members in groups.values():
        generator.shuffle(members)
    for rank in range(max(map(len, groups.values()), default=0)):
        turn = [members[rank] for members in groups.values() if rank < len(members)]
        generator.shuffle(turn)
        yield from turn


def comparison_questions(half: Half, generator: random.Random) -> Iterator[Question]:
    """Yes/no questions about two entities of a kind, yes half of the time."""
    while True:
        relation = generator.choice(list(COMPARISONS))
        kind = RELATIONS[relation].subject
        entities = [entity for entity in half.values() if entity.kind == kind]
        entity = generator.choice(entities)
        same = generator.random() < 0.5
        found, rest = entity.facts[relation], [one for one in entities if one is not entity]
        others = [one for one in rest if (one.facts[relation] == found) == same]
        if not rest:
            return
        if others:
            other = generator.choice(others)
            names = {"a": _the(entity.name), "b": _the(other.name)}
            text = generator.choice(COMPARISONS[relation]).format(**names)
            chain = tuple((one.name, relation, one.facts[relation]) for one in (entity, other))
            yield Question(text, "yes" if same else "no", "comparison", chain)


def _the(name: str) -> str:
    return f"the {name}" if name.endswith(" River") else name


def questions(
    half: Half, generator: random.Random, count: int, shares: Mapping[str, float]
) -> list[Question]:
    """`count` different questions of the kinds one_hop, two_hop and comparison in the given shares,
    shuffled. Raises ConfigError where the half is too small for them."""
    makers = {
        "one_hop": one_hop_questions,
        "two_hop": two_hop_questions,
        "comparison": comparison_questions,
    }
    chosen: dict[str, Question] = {}
    for kind, share in shares.items():
        wanted = len(chosen) + round(count * share)
        # Comparisons are drawn with repetition: a small half would be searched for new ones for
        # ever.
        most = DRAWS_PER_QUESTION * (count + len(half))
        for question in itertools.islice(makers[kind](half, generator), most):
            if len(chosen) >= wanted:
                break
            chosen.setdefault(question.text, question)
        if len(chosen) < wanted:
            raise ConfigError(
                f"environment.world: {len(half)} entities do not give "
                f"{round(count * share)} different {kind} questions; raise environment.world.size "
                "or ask for fewer questions."
            )
    result = list(chosen.values())
    generator.shuffle(result)
    return result


def ensure_world(
    directory: str | Path = "data/searchr1",
    seed: int = 7,
    train_questions: int = 2000,
    val_questions: int = 400,
    val_share: float = 0.35,
    prompt_template: str = "short",
    size: float = 1.0,
    excerpts: bool = False,
    *,
    elsewhere: Path | None = None,
) -> dict[str, Path]:
    """The paths of a world's files by name (corpus, pages, train, val), written if they are not
    there yet.

    Each set of arguments has a folder of its own under `directory`, so a world is never written
    over. size scales the number of entities (1.0: 2,420 passages). val_share: of the entities that
    are kept for validation questions. excerpts: passages hold the first sentence of an article
    alone, so that facts are read on the pages. elsewhere: where they are written in place of
    `directory`, if they are not there yet."""
    arguments = {
        "seed": seed,
        "train_questions": train_questions,
        "val_questions": val_questions,
        "val_share": val_share,
        "prompt_template": prompt_template,
        "size": size,
        "excerpts": excerpts,
    }
    modules = [
        Path(__file__).with_name(file).read_text(encoding="utf-8")
        for file in ("world.py", "articles.py", "prose.py", "prose.yaml")
    ]
    source = "".join([json.dumps(arguments, sort_keys=True), *modules])
    name = f"world-{seed}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    folder = Path(directory) / name
    if elsewhere is not None and not folder.is_dir():
        folder = elsewhere / name
    paths = {name: folder / file for name, file in FILES.items()}
    if folder.is_dir():
        return paths
    contents = make_world(**arguments)
    with replacing_directory(folder, keep_existing=True) as aside:
        for name, rows in contents.items():
            write = {"corpus": write_corpus, "pages": write_pages}.get(name, write_rows)
            write(aside / FILES[name], rows)
        write_rows(aside / "manifest.json", [arguments])
    logger.info("the world of seed %d is in %s", seed, folder)
    return paths


def make_world(
    seed: int,
    train_questions: int,
    val_questions: int,
    val_share: float,
    prompt_template: str,
    size: float,
    excerpts: bool = False,
) -> dict[str, Any]:
    """The contents of the files by name: passages, {url: page}, question rows. Equal arguments give
    equal contents."""
    halves, shares = {}, {"train": 1 - val_share, "val": val_share}
    known = {pool: len(titles(pool)) / COUNTS["work"] for pool in shares}  # names last longer
    most = min(known[pool] / share for pool, share in shares.items() if share)
    if size > most:
        raise ConfigError(
            f"environment.world: found size {size:g}, but titles of works last for "
            f"{math.floor(100 * most) / 100:g} where val_share is {val_share:g}; lower size, or "
            "change val_share."
        )
    for pool, share in shares.items():
        counts = {kind: max(2, round(count * size * share)) for kind, count in COUNTS.items()}
        halves[pool] = make_half(random.Random(f"{seed}/{pool}/entities"), pool, counts)
    entities = [entity for half in halves.values() for entity in half.values()]
    random.Random(f"{seed}/order").shuffle(entities)
    urls = {entity.name: page_url(seed, entity) for entity in entities}
    shown = {entity.name: excerpt(entity) if excerpts else entity.text for entity in entities}
    passages = [
        Passage(f"p{row:06d}", name, make_contents(name, text), urls[name])
        for row, (name, text) in enumerate(shown.items())
    ]
    retold = random.Random(f"{seed}/pages")
    pages = {urls[entity.name]: page_text(retold, entity) for entity in entities}
    rows = {}
    for pool, count in (("train", train_questions), ("val", val_questions)):
        asked = questions(halves[pool], random.Random(f"{seed}/{pool}/questions"), count, SHARES)
        rows[pool] = [
            _row(f"{pool}-{number}", question, prompt_template)
            for number, question in enumerate(asked)
        ]
    return {"corpus": passages, "pages": pages, **rows}


def page_url(seed: int, entity: Entity) -> str:
    return f"world://{seed}/{entity.name.replace(' ', '_')}"


def page_text(generator: random.Random, entity: Entity) -> str:
    """The entity's page: its article, and the same facts told again."""
    return f"{entity.name}\n\n{entity.text}\n\n{article(generator, entity)}"


def excerpt(entity: Entity) -> str:
    """The first sentence of the entity's article."""
    return entity.text.partition(". ")[0].rstrip(".") + "."


def _row(name: str, question: Question, prompt_template: str) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": render_prompt(prompt_template, question.text),
        "question": question.text,
        "solutions": [question.answer],
        "kind": question.kind,
        "hops": len(question.chain),
        "entities": sorted(question.entities),
    }
