"""The sentences of the fictional encyclopedia: every fact in several phrasings, and the questions that ask for it.

`{s}` is the subject and `{o}` the object of a fact. Names always follow a space in running text, so that they tokenize alike
wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One kind of fact. sentences: how passages state it. questions: how it is asked for a subject given by name or
    description. descriptions: noun phrases for the object, by which a two-hop question names its bridge. keyword: what a
    search query adds to the subject's name. aim: how the policy's thoughts call it."""

    name: str
    subject: str
    object: str
    keyword: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    descriptions: tuple[str, ...] = ()


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        Relation(
            "birthplace", "person", "city", "birthplace",
            ("{s} was born in {o}.", "{s} came from {o}, where the family kept a shop.", "The birthplace of {s} is {o}.",
             "A native of {o}, {s} grew up near the market.", "It was in {o} that {s} was born.", "{s} first saw the light of day in {o}."),
            ("Where was {s} born?", "What is the birthplace of {s}?", "In which town was {s} born?", "Which town is {s} from?"),
            ("the birthplace of {s}", "the town where {s} was born"),
        ),
        Relation(
            "teacher", "person", "person", "teacher",
            ("{s} studied under {o} for some years.", "The teacher of {s} was {o}.", "{s} learned the craft from {o}.",
             "As a pupil of {o}, {s} soon found a style."),
            ("Who taught {s}?", "Who was the teacher of {s}?", "Under whom did {s} study?"),
            ("the teacher of {s}",),
        ),
        Relation(
            "spouse", "person", "person", "spouse",
            ("{s} married {o} in the spring.", "{s} was married to {o}.", "The spouse of {s} was {o}.",
             "With {o}, whom {s} had married young, there were two children."),
            ("Who was {s} married to?", "Who was the spouse of {s}?", "Whom did {s} marry?"),
            ("the spouse of {s}",),
        ),
        Relation(
            "river", "city", "river", "river",
            ("{s} lies on the {o}.", "The {o} runs through {s}.", "The town of {s} stands on the banks of the {o}.",
             "Barges reach {s} by the {o}.", "In {s} seven bridges cross the {o}."),
            ("Which river flows through {s}?", "On which river does {s} lie?", "What river runs through {s}?"),
            ("the river of {s}", "the river that runs through {s}"),
        ),
        Relation(
            "country", "city", "country", "country",
            ("{s} is a town in {o}.", "{s} belongs to {o}.", "Few towns in {o} are as old as {s}.",
             "{s} is counted among the towns of {o}.", "Since the treaty {s} has been part of {o}."),
            ("In which country is {s}?", "What country does {s} belong to?", "Which country is {s} part of?"),
            ("the country of {s}", "the country to which {s} belongs"),
        ),
        Relation(
            "mouth", "river", "lake", "mouth",
            ("The {s} flows into {o}.", "At its end the {s} empties into {o}.", "The mouth of the {s} is at {o}.",
             "The waters of the {s} end in {o}.", "Slow and wide, the {s} reaches {o}."),
            ("Into which lake does {s} flow?", "Where does {s} end?", "What lake does {s} empty into?"),
        ),
        Relation(
            "source", "river", "hills", "source",
            ("The {s} rises in the {o}.", "The source of the {s} is in the {o}.", "From the {o} comes the {s}.",
             "The springs of the {s} are hidden in the {o}."),
            ("Where does {s} rise?", "What is the source of {s}?", "In which hills does {s} rise?"),
        ),
        Relation(
            "capital", "country", "city", "capital",
            ("The capital of {s} is {o}.", "{s} is governed from {o}.", "Its capital {o} is the pride of {s}.",
             "The kings of {s} sat in {o}, still the capital today."),
            ("What is the capital of {s}?", "Which town is the capital of {s}?", "From where is {s} governed?"),
            ("the capital of {s}",),
        ),
        Relation(
            "author", "work", "person", "author",
            ("{s} was written by {o}.", "The author of {s} is {o}.", "{o} wrote {s} in one winter.",
             "{s} made its author {o} famous.", "Of all that {o} wrote, {s} is read most."),
            ("Who wrote {s}?", "Who is the author of {s}?", "By whom was {s} written?"),
            ("the author of {s}", "the person who wrote {s}"),
        ),
        Relation(
            "founder", "company", "person", "founder",
            ("{s} was founded by {o}.", "The founder of {s} was {o}.", "{o} set up {s} with borrowed money.",
             "{s} owes its start to {o}.", "It was {o} who founded {s}."),
            ("Who founded {s}?", "Who was the founder of {s}?", "By whom was {s} founded?"),
            ("the founder of {s}", "the person who founded {s}"),
        ),
        Relation(
            "seat", "company", "city", "seat",
            ("{s} has its seat in {o}.", "The head office of {s} is in {o}.", "{s} works from a brick hall in {o}.",
             "From its house in {o} the firm of {s} sells all over the country."),
            ("Where does {s} have its seat?", "In which town is the head office of {s}?", "Where is {s} based?"),
            ("the town where {s} is based", "the seat of {s}"),
        ),
    )
}  # fmt: skip

OPENINGS: dict[str, tuple[str, ...]] = {
    "person": ("{s} was a {trade} of the last century.", "{s} is remembered as a {trade}.", "{s}, a {trade}, died in {year}.",
               "The {trade} {s} was active until {year}.", "Few knew {s}, the {trade}, by sight."),
    "city": ("{s} has a famous {thing} and some {count} houses.", "{s} is known for its {thing}.", "{s}, first named in {year}, keeps an old {thing}.",
             "Visitors come to {s} for the {thing}."),
    "river": ("The {s} is {count} miles long.", "The {s} is a quiet river with many {thing}s.", "Boats have used the {s} since {year}.",
              "In {year} the {s} froze over."),
    "country": ("{s} has been a kingdom since {year}.", "{s} is a land of {thing}s.", "The people of {s} are fond of their {thing}s.",
                "{s} joined the union in {year}."),
    "work": ("{s} is a {genre} in {count} parts.", "{s}, a {genre}, appeared in {year}.", "First shown in {year}, {s} is a {genre}.",
             "{s} is a well loved {genre}."),
    "company": ("{s} makes {goods}.", "{s} is a maker of {goods}.", "Since {year} {s} has sold {goods}.", "The {goods} of {s} are sold everywhere."),
}  # fmt: skip

PRONOUNS: dict[str, tuple[str, ...]] = {
    "person": ("she", "he"), "city": ("it", "the town"), "river": ("it", "the river"), "country": ("it", "the country"),
    "work": ("it", "the work"), "company": ("it", "the firm"),
}  # fmt: skip

TRADES = (
    "painter",
    "composer",
    "botanist",
    "poet",
    "physician",
    "sculptor",
    "astronomer",
    "printer",
    "sailor",
    "weaver",
    "judge",
    "chemist",
)
THINGS = (
    "bridge",
    "tower",
    "market",
    "garden",
    "mill",
    "harbour",
    "library",
    "fountain",
    "orchard",
    "castle",
    "lamp",
    "bell",
)
GENRES = ("novel", "play", "ballad", "opera", "comedy", "tragedy", "symphony", "poem")
GOODS = ("clocks", "ropes", "glass", "paper", "boats", "cloth", "pianos", "lenses", "bricks", "candles")
ADJECTIVES = ("Silent", "Golden", "Broken", "Distant", "Hidden", "Crooked", "Gentle", "Burning", "Frozen", "Hollow", "Restless", "Scarlet",
              "Wandering", "Patient", "Forgotten", "Bitter", "Northern", "Paper", "Second", "Wooden", "Empty", "Secret", "Little", "Last",
              "Blue", "Iron", "Lonely", "Merry", "Pale", "Quiet")  # fmt: skip
NOUNS = ("Harbour", "Window", "Orchard", "Winter", "Letter", "Garden", "Mirror", "Bridge", "Island", "Lantern", "Servant", "Voyage", "Mountain",
         "Doctor", "Station", "Summer", "Circle", "Forest", "Evening", "Kitchen", "Captain", "Painter", "Sister", "Shadow", "Ladder", "Village",
         "Stranger", "Clock", "Road", "House", "River", "Crown", "Tree", "Song", "Ship", "Door")  # fmt: skip
FIRMS = ("Works", "Mills", "Foundry", "Press", "Brothers", "Company", "Yard", "Bank")

COMPARISONS: dict[str, tuple[str, ...]] = {
    "birthplace": ("Were {a} and {b} born in the same town?", "Do {a} and {b} share a birthplace?"),
    "country": ("Are {a} and {b} in the same country?", "Do {a} and {b} belong to one country?"),
    "mouth": ("Do {a} and {b} flow into the same lake?", "Do {a} and {b} end in one lake?"),
}
