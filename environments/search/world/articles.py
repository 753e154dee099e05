"""The things of the fictional encyclopedia, their facts and their articles."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow_environments.search.world import prose
from rlflow_environments.search.world.prose import RELATIONS, NameSource


@dataclass
class Entity:
    """A thing with an article of its own. facts: relation name -> the object's name."""

    name: str
    kind: str
    facts: dict[str, str] = field(default_factory=dict)
    text: str = ""


Half = dict[str, Entity]
"""One closed half of a world: entities by name, in the order they were made."""


def make_half(generator: random.Random, pool: str, counts: Mapping[str, int]) -> Half:
    """A closed set of entities with all their facts and articles. counts: entities of each kind, at
    least 1 (2 people)."""
    names = NameSource(generator, pool)
    made: dict[str, list[Entity]] = {}
    for kind in prose.OPENINGS:
        named = _names_of(kind, counts.get(kind, 0), names, generator)
        made[kind] = [Entity(name, kind) for name in named]
    _relate(generator, made, names)
    half = {entity.name: entity for entity in itertools.chain(*made.values())}
    for entity in half.values():
        entity.text = article(generator, entity)
    return half


def _names_of(kind: str, count: int, names: NameSource, generator: random.Random) -> list[str]:
    if kind == "person":
        return [names.person() for _ in range(count)]
    if kind == "river":
        return [f"{names.word()} River" for _ in range(count)]
    if kind == "company":
        return [f"{names.word()} {generator.choice(prose.FIRMS)}" for _ in range(count)]
    if kind == "work":
        return generator.sample(titles(names.pool), count)
    return [names.word() for _ in range(count)]


def titles(pool: str) -> list[str]:
    """All titles of works of a pool, e.g. "The Silent Harbour"; the two pools share every word and
    no title."""
    pairs = itertools.product(enumerate(prose.ADJECTIVES), enumerate(prose.NOUNS))
    wanted = pool == "val"
    return [f"The {one} {two}" for (i, one), (j, two) in pairs if ((i + 3 * j) % 5 == 0) == wanted]


def _relate(generator: random.Random, made: dict[str, list[Entity]], names: NameSource) -> None:
    people, cities, rivers, countries = made["person"], made["city"], made["river"], made["country"]
    lakes = [f"Lake {names.word()}" for _ in range(max(1, len(rivers) // 2))]
    for river in rivers:
        river.facts = {"mouth": generator.choice(lakes), "source": f"{names.word()} Hills"}
    for index, city in enumerate(cities):
        country = countries[index] if index < len(countries) else generator.choice(countries)
        city.facts = {"river": generator.choice(rivers).name, "country": country.name}
        country.facts.setdefault("capital", city.name)
    couples = people[: len(people) // 2 * 2]
    for person, spouse in zip(couples[::2], couples[1::2], strict=True):
        person.facts["spouse"], spouse.facts["spouse"] = spouse.name, person.name
    for person in people:
        unfit = (person.name, person.facts.get("spouse"))
        drawn = [one.name for one in generator.sample(people, min(3, len(people)))]
        teachers = [name for name in drawn if name not in unfit]
        person.facts["birthplace"] = generator.choice(cities).name
        if teachers:
            person.facts["teacher"] = teachers[0]
    for work in made["work"]:
        work.facts["author"] = generator.choice(people).name
    for company in made["company"]:
        founder, seat = generator.choice(people), generator.choice(cities)
        company.facts = {"founder": founder.name, "seat": seat.name}


def article(generator: random.Random, entity: Entity) -> str:
    """The entity's passage: an opening and every fact once, phrased and ordered at random."""
    slots = {
        "s": entity.name,
        **{name: generator.choice(words) for name, words in prose.FILLERS.items()},
        "year": str(generator.randrange(1500, 1960)),
        "count": str(generator.randrange(3, 90)),
    }
    templates = [
        (generator.choice(RELATIONS[relation].sentences), object_)
        for relation, object_ in entity.facts.items()
    ]
    generator.shuffle(templates)
    place = 0 if generator.random() < 0.8 else len(templates)
    templates.insert(place, (generator.choice(prose.OPENINGS[entity.kind]), ""))
    pronoun = generator.choice(prose.PRONOUNS[entity.kind])
    sentences = []
    for template, object_ in templates:
        if sentences and generator.random() < 0.6:
            template = _with_pronoun(template, pronoun)
        sentences.append(template.format(**slots, o=object_))
    return re.sub(r"\ba (?=[aeiou][a-z])", "an ", " ".join(sentences))


def _with_pronoun(template: str, pronoun: str) -> str:
    """The sentence with its subject replaced where it leads the sentence or a clause."""
    for lead in ("The {s} ", "{s} "):
        if template.startswith(lead):
            return f"{pronoun.capitalize()} {template[len(lead) :]}"
    return template.replace(", {s} ", f", {pronoun} ").replace(", the {s} ", f", {pronoun} ")
