"""Claims about `rlflow search qa`: questions from documents that retrieval can answer, split without leaks."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.corpus import Corpus, Passage, make_contents
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.search.__main__ import main
from rlflow_environments.search.own_documents.blanks import blank_of, ordinary_words
from rlflow_environments.search.own_documents.candidates import Candidate, Hop, compose, find_facts
from rlflow_environments.search.own_documents.documents import (
    Document,
    cut_passages,
    read_documents,
    split_sentences,
)
from rlflow_environments.search.own_documents.english import facts_of, names_in
from rlflow_environments.search.own_documents.making import (
    QuestionReport,
    QuestionRequest,
    make_questions,
)
from rlflow_environments.search.own_documents.screening import (
    mixed,
    retrievable,
    screen,
    separate,
    validation_documents,
)
from rlflow_environments.search.questions import read_tasks
from rlflow_environments.search.rewards.scoring import contains_gold
from rlflow_environments.search.world.world import make_world
from tests.unit.environments.retrieval.search_corpora import read_pages

GENERATOR = random.Random


def world_documents(size: float = 0.1, seed: int = 5) -> list[Document]:
    world = make_world(
        seed, train_questions=1, val_questions=1, val_share=0.35, prompt_template="short", size=size
    )
    return [Document(f"{p.id}.txt", p.title, (p.body,), f"doc://{p.id}") for p in world["corpus"]]


def candidate(
    question: str, answer: str, *hops: Hop, names: tuple[str, ...] = (), kind: str = "k"
) -> Candidate:
    return Candidate(question, answer, kind, hops or (Hop(question, answer, 0),), frozenset(names))


def passage(row: int, title: str, text: str) -> Passage:
    return Passage(f"p{row}", title, make_contents(title, text), f"doc://{row}")


# ------------------------------------------------------------------ documents


def test_text_markdown_html_and_json_lines_become_the_same_document(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text(
        "Ann Lee\n\nAnn Lee was born\nin Paris.\n\n  She wrote books. \n"
    )
    (tmp_path / "deep" / "b.md").write_text(
        "---\nauthor: x\n---\n# Ann *Lee*\n\nAnn [Lee](http://x) was **born**\nin Paris.\n\n"
        "```\ncode = 1\n```\n\nShe wrote books.\n"
    )
    (tmp_path / "c.html").write_text(
        "<html><head><title>Site | Ann Lee</title><script>var x = 1;</script></head><body><nav>Home</nav>"
        "<h1>Ann Lee</h1><p>Ann <b>Lee</b> <span>was</span> <strong>born</strong>\nin Paris.</p>"
        "<div>She wrote <i>books</i>.</div></body></html>"
    )
    rows = [{"contents": '"Ann Lee"\nAnn Lee was born in Paris.\n\nShe wrote books.', "url": "http://ann"},
            {"title": "Ann Lee", "contents": "Ann Lee was born in Paris.\n\nShe wrote books."},
            {"title": "Ann Lee", "text": "Ann Lee was born in Paris.\n\nShe wrote books."}]  # fmt: skip
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / ".hidden.txt").write_text("not read")
    (tmp_path / "only_a_title.md").write_text("# Ann Lee\n")
    documents, others = read_documents(tmp_path)
    assert [document.name for document in documents] == [
        "a.txt",
        "c.html",
        "d.jsonl#1",
        "d.jsonl#3",
        "d.jsonl#5",
        "deep/b.md",
    ]
    for document in documents:
        assert (document.title, document.paragraphs) == (
            "Ann Lee",
            ("Ann Lee was born in Paris.", "She wrote books."),
        )
    assert documents[0].url == "doc://a.txt" and documents[2].url == "http://ann"
    assert others == {".png": 1, "empty": 1}


def test_a_link_out_of_a_folder_of_documents_is_no_document(tmp_path):
    """A downloaded folder would show any file of this user to the policy."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (tmp_path / "id_rsa").write_text("A secret.")
    (folder / "a.txt").write_text("Text.")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "c.txt").symlink_to(tmp_path / "id_rsa")
    documents, others = read_documents(folder)
    assert [document.name for document in documents] == ["a.txt", "b.txt"]
    assert others == {"links out of it": 1}


def test_front_matter_goes_and_a_section_between_rules_stays(tmp_path):
    for name, text in (
        ("a.md", "---\ntitle: x\n---\nText.\n"),
        ("b.md", "---\nFirst part.\n\n---\n\nText.\n"),
    ):
        (tmp_path / name).write_text(text)
    assert [one.paragraphs for one in read_documents(tmp_path)[0]] == [
        ("Text.",),
        ("First part.", "Text."),
    ]


def test_an_html_page_may_declare_its_encoding(tmp_path):
    page = '<html><head><meta charset="iso-8859-1"><title>Stra\xdfe</title></head><body><p>Gr\xfc\xdfe.</p></body></html>'
    (tmp_path / "page.html").write_bytes(page.encode("latin-1"))
    ((document,), _) = read_documents(tmp_path)
    assert (document.title, document.paragraphs) == ("Straße", ("Grüße.",))


def test_a_document_without_a_heading_is_named_by_its_file(tmp_path):
    (tmp_path / "my_first-notes.txt").write_text(
        "This is a sentence that ends with a full stop.\n\nMore."
    )
    (document,), _ = read_documents(tmp_path / "my_first-notes.txt")
    assert document.title == "my first notes" and len(document.paragraphs) == 2


def test_documents_that_cannot_be_read_are_counted_and_skipped_only_when_allowed(tmp_path):
    (tmp_path / "good.txt").write_text("Title\n\nText.")
    (tmp_path / "latin.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    (tmp_path / "odd.html").write_text("<p>Text.</p><![foo]]><p>More.</p>")
    (tmp_path / "rows.jsonl").write_text('{"title": "x"}\n{"title": "T", "text": "fine"}\n')
    with pytest.raises(
        DataError,
        match=r"3 of 5 rows .* bad: latin\.txt: not UTF-8.*odd\.html: no HTML.*rows\.jsonl#1",
    ):
        read_documents(tmp_path)
    documents, _ = read_documents(tmp_path, skip_bad=True)
    assert [document.name for document in documents] == ["good.txt", "rows.jsonl#2"]
    with pytest.raises(DataError, match="expected documents"):
        read_documents(tmp_path / "absent")


# ------------------------------------------------------------------ passages and facts


def test_passages_keep_every_sentence_whole_and_none_twice():
    sentences = [f"Sentence number {i} of Dr. A. Smith says something." for i in range(40)]
    document = Document("d", "Title", (" ".join(sentences[:25]), " ".join(sentences[25:])), "u")
    passages, owners = cut_passages([document, document], max_characters=300)
    assert all(len(passage.body) <= 300 for passage in passages)
    first = [passage for passage, owner in zip(passages, owners, strict=True) if owner == 0]
    assert [
        s for passage in first for line in passage.body.split("\n") for s in split_sentences(line)
    ] == sentences
    assert len({passage.id for passage in passages}) == len(passages) and {
        passage.url for passage in passages
    } == {"u"}
    (cut,), _ = cut_passages([Document("d", "T", ("x" * 250,), "u")], 300)
    assert cut.body == "x" * 250


@pytest.mark.parametrize(
    ("sentence", "relation", "subject", "object_"),
    [
        ("Ada Byron was born in London.", "birthplace", "Ada Byron", "London"),
        ("She was born in London, England.", "birthplace", "Ada Lovelace", "London"),
        ("The capital of New Zealand is Wellington.", "capital", "New Zealand", "Wellington"),
        (
            "The Iron Harbour was written by Ole van der Berg.",
            "author",
            "Iron Harbour",
            "Ole van der Berg",
        ),
        ("Acme Works was founded in 1890.", "founding year", "Acme Works", "1890"),
        ("Örebro is a small town in Sweden.", "country", "Örebro", "Sweden"),
    ],
)
def test_relations_are_read_off_plain_sentences(sentence, relation, subject, object_):
    facts = list(facts_of(sentence, "Ada Lovelace"))
    assert [(fact.relation, fact.subject, fact.object) for fact in facts] == [
        (relation, subject, object_)
    ]


def test_a_sentence_may_state_several_facts():
    facts = facts_of("Ada Byron was born on 10 December 1815 in London.", "")
    assert {fact.relation: fact.object for fact in facts} == {
        "birthplace": "London",
        "birth year": "1815",
    }


@pytest.mark.parametrize(
    "sentence",
    [
        "Acme Works was founded by Ann Lee and Bob Ray.",  # half an answer
        "The tower of Pisa was designed by Bonanno.",  # about the tower
        "The people say that Ann Lee was born in Paris.",  # hearsay
        "It was born in fire.",
    ],
)
def test_the_rules_would_rather_leave_a_fact_out_than_get_it_wrong(sentence):
    assert not list(facts_of(sentence, "some notes"))


def test_names_leave_out_the_words_that_begin_a_sentence():
    told = "In Paris the Duke of York met Ann Lee. However, Paris slept."
    assert names_in(told) == ["Paris", "Duke of York", "Ann Lee"]
    assert names_in("in Bob's house, /usr/Lib and my_Name are no names") == ["Bob"]


def test_a_blank_prefers_the_title_of_another_document_and_needs_a_second_name():
    fact = blank_of(
        "She sold the Iron Mill to Bob Ray in Leeds.", "Ann Lee", {"Bob Ray", "Ann Lee"}
    )
    assert not isinstance(fact, str) and fact.object == "Bob Ray"
    assert fact.question[0] == 'What fills the blank in "{s} sold the Iron Mill to ____ in Leeds."?'
    barges = "Barges have reached it by the Iron River."  # "Barges" is no name
    assert blank_of(barges, "Leeds", {"Leeds"}) == "no name"
    assert blank_of("The town has a famous market in summer.", "Leeds", {"Leeds"}) == "no name"


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("Obtain patterns from FILE and use --regexp=PATTERNS as the patterns.", "code"),
        ("OPTIONS -a, --all Tell the command what the Author wanted to be told.", "code"),
        ("Copyright 1998 Free Software Foundation, Inc. This is what it was.", "legal"),
        ("Permission is granted under the License to Ann Lee and Bob Ray.", "legal"),
        ("The file setup.py was written by Ann Lee in a summer in Paris.", "code"),
        ("It was read from /etc/passwd by Ann Lee in a summer in Paris.", "code"),
        ("Set LONG_NAME where Ann Lee and Bob Ray were told to set it.", "code"),
        ("See ls(1) for what Ann Lee and Bob Ray have written about it.", "code"),
        ("It was said (by Ann Lee in a summer and by Bob Ray in Paris.", "unbalanced"),
        ('It was "called by Ann Lee in a summer and by Bob Ray in Paris.', "unbalanced"),
        ("PATTERNS Use what Ann Lee and Bob Ray have written about patterns.", "fragment"),
        ("where it was written by Ann Lee and by Bob Ray in a summer.", "fragment"),
        ("Patch for the assembler of the Alpha from Ann Lee and Bob Ray.", "fragment"),
        ("Ann Lee, Bob Ray, Cy Day, Dan Fox and Eve Gray were there.", "fragment"),
        ("80 Failed to be what Ann Lee and Bob Ray were told it was.", "fragment"),
        ("Ann Lee was published by the Press (Paris), 2nd ed.", "fragment"),
        ("He was told by Ann Lee that it was the Foundation, Inc.", "fragment"),
    ],
)
def test_what_is_no_sentence_gets_no_blank_and_says_why(sentence, reason):
    found = blank_of(sentence, "notes", set(), {"use"})
    assert found == reason or (sentence.endswith("Inc.") and "Inc" not in found.object)


@pytest.mark.parametrize(
    ("sentence", "right"),
    [
        ("It was Ann Lee who was told to wait. Tell was what he said.", "Ann Lee"),
        ("She was a guest of Ann Lee and then of the Foundation Inc.", "Ann Lee"),
        ("She was told in Leeds that Ann Lee had come to the Court.", "Ann Lee"),
        ("She was told in Leeds that Ann Lee made the Paris-based part.", "Ann Lee"),
        ("She was told in Leeds by Ann Lee what I'm told of it.", "Ann Lee"),
    ],
)
def test_only_names_are_asked_for(sentence, right):
    fact = blank_of(sentence, "notes", set(), {"tell", "court"})
    assert not isinstance(fact, str) and fact.object == right


def test_blanks_in_genuine_documentation_are_whole_sentences_about_names():
    """Python's own reference, which is full of code, tables and headings."""
    topics = importlib.import_module("pydoc_data.topics").topics
    documents = [
        Document(
            name, name, tuple(" ".join(one.split()) for one in topics[name].split("\n\n")), name
        )
        for name in ("import", "specialnames", "typesseq", "formatstrings", "debugger", "class")
    ]
    passages, _ = cut_passages(documents)
    refused: Counter[str] = Counter()
    facts = [one.fact for one in find_facts(passages, refused) if one.fact.relation == "blank"]
    assert 0 < len(facts) < 0.1 * sum(refused.values())
    lower = ordinary_words(passage.body for passage in passages)
    for fact in facts:
        text = fact.question[0].removeprefix('What fills the blank in "').removesuffix('"?')
        whole = text.replace("{s}", fact.subject).replace("____", fact.object)
        assert whole[0].isupper() or whole[0] in '"“', whole
        assert whole.count("(") == whole.count(")") and whole.count('"') % 2 == 0, whole
        assert not re.search(r"\w=|--|\(\)|[<>_\\{}]", whole), whole
        assert text.count("____") == 1 and not re.search(r"\w____|____\w", text), text
        assert fact.object[0].isupper() and fact.object.lower() not in lower, fact


def test_a_manual_page_is_read_without_its_headings_and_broken_words(tmp_path):
    page = (
        "NAME\n       mk - make things\n\n"
        "OPTIONS\n       -n, --dry\n              Print what Ann Lee would have con\u2010\n"
        "              structed in Paris.\n"
    )
    (tmp_path / "mk.txt").write_text(page, encoding="utf-8")
    ((document,), _) = read_documents(tmp_path)
    assert document.paragraphs[-1] == "Print what Ann Lee would have constructed in Paris."
    assert "OPTIONS" in document.paragraphs


def test_the_report_says_in_one_line_how_many_sentences_have_no_blank_and_why():
    report = QuestionReport(refused=Counter({"code": 3, "fragment": 1200}))
    (line,) = (line for line in report.lines() if "1,203 sentences" in line)
    assert "1,200 no whole sentence, 3 code" in line


def test_two_hops_name_the_bridge_by_its_description():
    passages = [
        passage(0, "Blue Book", "Blue Book was written by Ann Lee."),
        passage(1, "Ann Lee", "Ann Lee was born in Paris."),
    ]
    pairs = [
        pair
        for pair in compose(find_facts(passages, Counter()), GENERATOR(0))
        if len(pair.hops) == 2
    ]
    assert [pair.answer for pair in pairs] == ["Paris"]
    assert pairs[0].question in (
        "Where was the author of Blue Book born?",
        "What is the birthplace of the author of Blue Book?",
    )
    assert [(hop.answer, hop.passage) for hop in pairs[0].hops] == [("Ann Lee", 0), ("Paris", 1)]


# ------------------------------------------------------------------ screening


PASSAGES = [
    passage(0, "A", "Ann Lee lives in Paris with Bob Ray."),
    passage(1, "B", "Bob Ray was born in Leeds."),
]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (candidate("Is Paris the home of Ann Lee?", "paris"), "answer_in_question"),
        (candidate("Who?", "The"), "empty_answer"),
        (candidate("Where is she?", "Rome"), "not_in_documents"),
        (
            candidate("Who is near?", "Paris", Hop("a", "Bob Ray", 0), Hop("b", "Paris", 0)),
            "one_hop_suffices",
        ),
        (
            candidate(
                "Where was Bob Ray born?", "Leeds", Hop("a", "Bob Ray", 0), Hop("b", "Leeds", 1)
            ),
            "one_hop_suffices",
        ),
    ],
)
def test_each_fault_is_dropped_for_its_own_reason(bad, reason):
    dropped: Counter[str] = Counter()
    good = candidate("Where does Ann Lee live?", "Paris")
    assert screen([bad, good], PASSAGES, dropped) == [good] and dropped == {reason: 1}


def test_ambiguous_and_repeated_questions_are_dropped():
    dropped: Counter[str] = Counter()
    near, other = candidate("Who is near?", "Paris"), candidate("who is NEAR", "Bob Ray")
    fine = candidate("Where does Ann Lee live?", "Paris")
    assert screen([near, other, fine, fine], PASSAGES, dropped) == [fine]
    assert dropped == {"ambiguous": 2, "repeated": 1}


def test_a_question_whose_answer_retrieval_does_not_bring_is_dropped():
    retriever = make_retriever("bm25", PASSAGES)
    found = candidate("q", "Leeds", Hop("Bob Ray born", "Leeds", 1))
    lost = candidate("q", "Paris", Hop("Bob Ray born", "Leeds", 1), Hop("Zebra", "Paris", 0))
    dropped: Counter[str] = Counter()
    assert retrievable([found, lost], retriever, 1, dropped) == [found] and dropped == {
        "not_retrieved": 1
    }


# ------------------------------------------------------------------ split and leaks


def test_a_leak_costs_the_training_question_or_where_it_is_common_the_validation_question():
    train = [
        candidate(f"Where is T{i}?", "France" if i < 50 else f"City{i}", names=(f"t{i}",))
        for i in range(100)
    ]
    train.append(candidate("Who met Ann Lee?", "Nobody", names=("ann lee",)))
    val = [
        candidate("Where is V?", "France", names=("v",)),
        candidate("Where is W?", "Ann Lee", names=("w",)),
    ]
    dropped: Counter[str] = Counter()
    kept, chosen = separate(train, val, 10, dropped)
    assert chosen == val[1:] and kept == train[:100]
    assert dropped == {"leak_in_validation": 1, "leak_in_training": 1}


def test_new_documents_move_no_old_one_across_the_split():
    documents = world_documents()
    before = {documents[i].name for i in validation_documents(documents[:100], 0.3, 1)}
    after = {documents[i].name for i in validation_documents(documents, 0.3, 1)}
    assert (
        before == after & {document.name for document in documents[:100]} and 10 < len(before) < 50
    )


def test_every_beginning_has_its_share_of_two_hop_questions():
    hop = Hop("q", "a", 0)
    candidates = [
        candidate(f"{i}", "a", *[hop] * (1 + i % 2), kind=f"k{i % 7}") for i in range(2000)
    ]
    ordered = mixed(candidates, 0.3, GENERATOR(0))
    assert sorted(asked.question for asked in ordered) == sorted(
        asked.question for asked in candidates
    )
    assert 0.2 < sum(len(asked.hops) == 2 for asked in ordered[:300]) / 300 < 0.4


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    make_questions(world_documents(), folder, QuestionRequest(train=200, val=30, val_share=0.3))
    return folder


def rows_of(folder: Path, name: str) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_no_name_or_answer_of_validation_occurs_in_training(made):
    train, val = rows_of(made, "train"), rows_of(made, "val")
    assert len(train) > 50 and len(val) >= 20
    told = "\n".join(" | ".join([row["question"], *row["solutions"]]) for row in train)
    for row in val:
        for name in [*row["solutions"], *row["entities"]]:
            assert not contains_gold(told, [name]), (name, row["question"])
    assert not {d for row in train for d in row["documents"]} & {
        d for row in val for d in row["documents"]
    }


def test_every_question_is_answered_by_its_evidence_and_does_not_give_its_answer_away(made):
    passages = {passage.id: passage.contents for passage in Corpus(made / "corpus.jsonl")}
    rows = rows_of(made, "train") + rows_of(made, "val")
    for row in rows:
        assert contains_gold(passages[row["evidence"][-1]], row["solutions"])
        assert not contains_gold(row["question"], row["solutions"])
    two = [row for row in rows if row["hops"] == 2]
    assert len(two) > len(rows) / 5 and all(len(row["evidence"]) == 2 for row in two)
    assert not any(contains_gold(passages[row["evidence"][0]], row["solutions"]) for row in two)


def test_the_files_are_those_of_the_field(made):
    tasks = read_tasks(made / "val.jsonl", "val", "short")
    assert tasks[0].metadata["hops"] in (1, 2) and tasks[0].prompt.startswith("Question: ")
    assert set(read_pages(made / "pages.jsonl")) == {
        passage.url for passage in Corpus(made / "corpus.jsonl")
    }
    report = json.loads((made / "report.json").read_text())
    written = sum(report["train"].values()) + sum(report["val"].values())
    assert report["candidates"] == written + sum(report["dropped"].values())


def test_equal_seeds_give_equal_files_and_others_do_not(made, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    make_questions(world_documents(), again, QuestionRequest(train=200, val=30, val_share=0.3))
    make_questions(
        world_documents(), other, QuestionRequest(train=200, val=30, val_share=0.3, seed=1)
    )
    for name in ("corpus.jsonl", "pages.jsonl", "train.jsonl", "val.jsonl", "report.json"):
        assert (again / name).read_bytes() == (made / name).read_bytes()
    assert (other / "train.jsonl").read_bytes() != (made / "train.jsonl").read_bytes()


def test_too_few_documents_are_one_clear_error(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Ann Lee\n\nAnn Lee was born in Paris.")
    assert main(["qa", str(tmp_path / "a.txt"), str(tmp_path / "out")]) == 2
    assert "question is left of 1 candidates from 1 documents" in capsys.readouterr().err


def test_output_among_the_documents_is_refused(tmp_path, capsys):
    assert main(["qa", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "would be read the next time" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"train": 0}, {"val_share": 1.0}, {"multi_hop": 1.5}, {"top_k": 0}]
)
def test_values_out_of_range_are_refused_before_anything_is_read(change, tmp_path):
    with pytest.raises(ConfigError, match="--" + next(iter(change)).replace("_", "-")):
        make_questions([], tmp_path, QuestionRequest(**change))
    assert not list(tmp_path.iterdir())


def test_documents_that_nobody_reads_are_told_with_what_makes_text_of_them(tmp_path, capsys):
    folder = tmp_path / "documents"
    folder.mkdir()
    for document in world_documents(0.05):
        (folder / document.name).write_text(f"{document.title}\n\n{document.text}")
    for name in ("report.PDF", "slides.pdf", "notes.docx", "photo.png"):
        (folder / name).write_bytes(b"x")
    assert (
        main(
            [
                "qa",
                str(folder),
                str(tmp_path / "out"),
                "--train",
                "20",
                "--val",
                "10",
                "--val-share",
                "0.3",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "NOT READ: 2 .pdf (make text of them first, for instance: pdftotext FILE.pdf)" in shown
    assert "NOT READ: 1 .docx" in shown and ".png" not in shown and "NOTE" not in shown
    assert json.loads((tmp_path / "out" / "report.json").read_text())["not_read"] == {
        ".docx": 1,
        ".pdf": 2,
        ".png": 1,
    }


def test_few_or_poor_questions_are_told_with_the_way_to_better_ones():
    few = QuestionReport(
        asked=100, train=Counter(single_hop=20), val=Counter(single_hop=11), blanks=31
    )
    assert (
        "NOTE: 31 of 100 questions that were asked for, 31 of them blanks in sentences."
        in "\n".join(few.lines())
    )
    assert "--endpoint URL --model NAME" in few.lines()[-1]
    blanks = QuestionReport(asked=100, train=Counter(single_hop=90), blanks=60)
    assert (
        blanks.advice()
        and not QuestionReport(asked=100, train=Counter(single_hop=90), blanks=20).advice()
    )
    assert not dataclasses.replace(few, by_rule=False).advice(), "a model composed them already"
