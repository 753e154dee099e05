"""Claims about which questions a corpus can answer: the finder agrees with a plain search for each answer."""

from __future__ import annotations

import json
import random
import time

import pytest

from rlflow.errors import ConfigError
from rlflow.types import Task
from rlflow_environments.retrieval.corpus import Passage, write_rows
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.__main__ import main
from rlflow_environments.search.answerability.finder import AnswerFinder, supporting_titles
from rlflow_environments.search.questions import read_tasks
from rlflow_environments.search.rewards import scoring
from tests.unit.environments.search.search_agents import converse


def passage(title: str, text: str) -> Passage:
    return Passage("0", title, f'"{title}"\n{text}', "doc://0")


def found(golds: list[str], *texts: str) -> bool:
    finder = AnswerFinder([Task("q", "?", golds)])
    finder.read(passage("T", text) for text in texts)
    return finder.findings[0].answer


def test_an_answer_is_looked_for_as_exact_match_compares_it():
    assert found(["The U.S.A."], "in the usa, since")
    assert found(["nothing", "New  York"], "new-york", "a New the York.")  # articles go, and white space is one
    assert not found(["no"], "north and know") and found(["no"], "They said: no!")
    assert not found(["new york city"], "new york", "city of new york")
    assert not found(["The", "?!"], "the ?!")  # nothing is left of them


def test_it_agrees_with_a_plain_search_for_every_answer():
    generator = random.Random(0)
    words = ["a", "the", "Bo", "bo,", "la", "LA.", "mi", "mi-mi"]
    texts = [" ".join(generator.choices(words, k=12)) for _ in range(40)]
    tasks = [Task(str(i), "?", [" ".join(generator.choices(words, k=generator.randint(1, 5)))]) for i in range(150)]
    finder = AnswerFinder(tasks)
    finder.read(passage("T", text) for text in texts)
    contents = [passage("T", text).contents for text in texts]
    expected = [any(scoring.contains_gold(text, task.answer) for text in contents) for task in tasks]
    assert [finding.answer for finding in finder.findings] == expected
    assert 20 < sum(expected) < 140


def test_supporting_articles_must_be_there_too():
    row = {"supporting_facts": {"title": ["Ann Lee", "The Sea"], "sent_id": [0, 1]}}
    other = {"supporting_facts": [["Ann Lee", 0]]}
    tasks = [Task("a", "?", ["1901"], row), Task("b", "?", ["1901"], other), Task("c", "?", ["x"])]
    finder = AnswerFinder(tasks)
    finder.read([passage("Ann Lee", "born in Ys"), passage("Other", "in 1901")])
    a, b, c = finder.findings
    assert (a.answer, a.answerable, a.found) == (True, False, {"ann lee"})
    assert (b.answerable, b.supported) == (True, False)
    finder.read([passage("Ann Lee", "died 1901")])
    assert b.supported and not c.answerable


@pytest.mark.parametrize("facts", [None, "x", 3, {"title": "x"}, {"title": [1]}, [["x"], [], 5, [2, "x"]]])
def test_rows_without_usable_titles_have_fewer(facts):
    assert supporting_titles({"metadata": {"supporting_facts": facts}}) in ([], ["x"])


def test_its_time_is_linear_in_the_corpus_and_does_not_depend_on_the_questions():
    def seconds(questions: int, words: int) -> float:
        finder = AnswerFinder([Task(str(i), "?", [f"w{i} x y"]) for i in range(questions)])
        text = passage("T", " ".join(f"w{i % 500}" for i in range(words)))
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            finder.read([text])
            best = min(best, time.process_time() - start)
        return best

    assert seconds(10, 40_000) < 4 * seconds(10, 20_000)
    assert seconds(10_000, 20_000) < 4 * seconds(200, 20_000)


def test_the_command_reports_by_set_marks_and_what_is_marked_is_left_out(tmp_path, capsys):
    data = tmp_path / "sets"
    data.mkdir()
    write_rows(data / "nq.jsonl", [{"question": f"{i}?", "golden_answers": [f"number{i}"], "id": str(i)} for i in range(4)])
    titled = {"question": "t?", "golden_answers": ["number1"], "metadata": {"supporting_facts": {"title": ["B", "C"]}}}
    write_rows(data / "hotpotqa.jsonl", [titled])
    texts = {"A": "number0", "B": "Number1.", "C": "x"}
    corpus = write_rows(tmp_path / "c.jsonl", [{"title": title, "text": text} for title, text in texts.items()])
    out = tmp_path / "marked.jsonl"
    assert main(["check-questions", str(data), "--corpus", str(corpus), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "nq: 4 questions; answerable 50.0%" in printed and "all: 5 questions; answerable 60.0%" in printed
    assert "of 1 with supporting articles, all there 100.0%, gold answer in one of them 100.0%" in printed
    assert [json.loads(line)["answerable"] for line in out.read_text().splitlines()].count(True) == 3
    kept = read_tasks({"path": out, "skip_unanswerable": True}, "train")
    assert sorted(task.answer[0] for task in kept) == ["number0", "number1", "number1"]
    with pytest.raises(ConfigError, match="5 of 5 questions have no mark 'answerable'"):
        read_tasks({"path": data, "skip_unanswerable": True}, "train")
    assert main(["check-questions", str(data)]) == 2 and "--corpus or --index" in capsys.readouterr().err


def test_the_corpus_of_an_index_is_the_one_it_was_built_on(tmp_path, capsys):
    corpus = write_rows(tmp_path / "c.jsonl", [{"title": "A", "text": "number0"}])
    questions = write_rows(tmp_path / "q.jsonl", [{"question": "?", "answers": ["number0"]}])
    assert main(["build", "--corpus", str(corpus), "--out", str(tmp_path / "index"), "--index", "bm25"]) == 0
    assert main(["check-questions", str(questions), "--index", str(tmp_path / "index")]) == 0
    assert "answerable 100.0%" in capsys.readouterr().out
    corpus.unlink()
    assert main(["check-questions", str(questions), "--index", str(tmp_path / "index")]) == 2
    assert "where none is now" in capsys.readouterr().err


def test_a_reward_without_evidence_is_counted(tmp_path):
    corpus = write_rows(tmp_path / "c.jsonl", [{"title": "A", "text": "number0 harbour"}, {"title": "B", "text": "market"}])
    train = write_rows(tmp_path / "train.jsonl", [{"question": "where?", "solutions": ["harbour"]}])
    environment = SearchEnvironment(corpus, train, retriever="bm25", top_k=1)

    def counted(*says: str) -> tuple[float, float]:
        last = converse(environment, list(says))[-1]
        return last.reward, last.metrics["rewarded_without_evidence"]

    assert counted("<answer>harbour</answer>") == (1.0, 1.0)
    assert counted("<search>market</search>", "<answer>harbour</answer>") == (1.0, 1.0)
    assert counted("<search>number0</search>", "<answer>harbour</answer>") == (1.0, 0.0)
    assert counted("<answer>market</answer>") == (0.0, 0.0)
