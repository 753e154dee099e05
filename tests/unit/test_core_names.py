"""The core knows no plug-in and no method: nothing under rlflow/ names an environment, what one works with, a recipe or a paper's
system, and nothing outside rlflow/algorithms/ names a method."""

from __future__ import annotations

import re

import pytest

from tests.unit.sources import ROOT

FOLDERS = ("environments", "recipes")
GENERAL = {"adapters", "browser", "common", "dataset", "endpoint", "jobs", "program", "programs", "real",
           "tool_use", "wrappers"}  # fmt: skip
"""Folders of which the core itself speaks in general."""


def own_words() -> tuple[str, ...]:
    """The names of the other folders."""
    folders = [entry for folder in FOLDERS for entry in (ROOT / folder).iterdir() if entry.is_dir()]
    return tuple(sorted({entry.name for entry in folders} - GENERAL - {"__pycache__"}))


FILES = sorted(
    path
    for path in (ROOT / "rlflow").rglob("*")
    if path.is_file() and path.suffix not in (".pyc", ".typed")
)

# Parts of words count: `search_s`, `SearchAccount`, `num_retrieved`.
PARTS = ("sandbox", "mathematics", "nethack", "search", "corpus", "corpora", "retriev", "passage", "qdrant",
         "faiss", "guess", "encyclopedia", "swarm")  # fmt: skip
# Systems and papers, as whole words or as parts of an identifier.
SYSTEMS = (
    "areal",
    "astraflow",
    "llamarl",
    "dart",
    "oni",
    "vlac",
    "rlinf",
    "asearcher",
    "slime",
    "verl",
    "skyrl",
    "ragen",
    "deepswe",
    "skywork",
)
# Methods, as SYSTEMS. Not grpo and gae: the default of a key, and what an error tells the user to set.
METHODS = ("dapo", "drgrpo", "gspo", "cispo", "aipo", "gmpo", "dppo", "m2po", "icepop", "kpop", "greso", "maxrl", "gdpo", "gtpo",
           "rloo", "sapo", "trpo", "reinforce")  # fmt: skip


def whole_words(words: tuple[str, ...]) -> str:
    return rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])"


NAMED = re.compile(f"{'|'.join(PARTS)}|{whole_words((*SYSTEMS, *own_words()))}", re.I)
METHOD = re.compile(whole_words(METHODS), re.I)
# The English word, the methods of `re` and torch, and the optimizers' term.
HARMLESS = re.compile(r"research|\.search\(|searchsorted|line search", re.I)
PRESETS = "rlflow/algorithms/presets/"
CITING = "rlflow/algorithms/"
"""Where the docstrings may cite: a method's source is a paper."""


def names_in(path: str, text: str) -> list[str]:
    """`line: word` of everything that the core must not name."""
    if path.startswith(PRESETS):
        return []
    patterns = [NAMED]
    if not path.startswith(CITING):
        patterns.append(METHOD)
    else:
        text = re.sub(r'""".*?"""', lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    lines = enumerate(HARMLESS.sub("", text).splitlines(), start=1)
    return [
        f"{path}:{number}: {found[0]}"
        for number, line in lines
        for one in patterns
        for found in one.finditer(line)
    ]


def test_no_file_of_the_core_names_a_plug_in_a_recipe_or_a_paper() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
    found = [name for path, text in texts.items() for name in names_in(path, text)]
    assert not found, "say it in general, or register it from the plug-in:\n" + "\n".join(found)


def test_no_file_of_the_core_is_called_after_one() -> None:
    names = [str(path.relative_to(ROOT)) for path in FILES]
    assert not [name for name in names if not name.startswith(PRESETS) and NAMED.search(name)]
    assert not [name for name in names if not name.startswith(CITING) and METHOD.search(name)]


def test_every_environment_and_recipe_is_among_the_words() -> None:
    words = own_words()
    assert {"nethack", "search", "searchr1", "swarm"} <= set(words)
    assert all(NAMED.search(f"a {word}_s") for word in words)
    assert {entry.name for folder in FOLDERS for entry in (ROOT / folder).iterdir()} >= GENERAL


@pytest.mark.parametrize(
    "text, count",
    [
        ("x = torch.searchsorted(a, b)  # a line search, re.search(y), research", 0),
        ("time/search_share", 1),
        ("class SearchAccount: ...", 1),
        ("# as verl has it, but not overly", 1),
        ("only companions partially", 0),
        ("areal_mask = num_retrieved", 2),
        ("loss: GSPO's, of m2po_range", 2),
    ],
)
def test_the_reader_finds_words_and_no_others(text: str, count: int) -> None:
    assert len(names_in("rlflow/x.py", text)) == count


def test_a_method_is_named_where_it_is_written_and_nowhere_else() -> None:
    assert not names_in("rlflow/algorithms/losses/x.py", 'name = "gspo"') and names_in(
        "rlflow/loop.py", 'name = "gspo"'
    )
