"""Questions as tasks, from one file, several files, or a folder of evaluation sets.

Layouts of rows, by release, are the places of prompt, gold answers and id:

searchr1    reward_model.ground_truth.target: PeterJinGo/nq_hotpotqa_train, verl's version;
            reward_spec...: SkyRL's
rlinf       solutions, text or list: RLinf/Search-R1-Data
flashrag    golden_answers: RUC-NLPIR/FlashRAG_datasets
asearcher   answer, text or list, beside one of qid, idx, aug_answer, source:
            inclusionAI/ASearcher-train-data, -test-data
plain       answers or answer: anything else
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from rlflow.components import check_options
from rlflow.errors import ConfigError, DataError, did_you_mean
from rlflow.types import Task
from rlflow_environments.common.jsonl import BadRow, existing, kind_of, refuse, text_of
from rlflow_environments.common.rows import read_rows
from rlflow_environments.search.protocols.text import render_prompt
from rlflow_environments.search.questions.files import find_sets, set_name
from rlflow_environments.search.rewards.scoring import answer_texts

logger = logging.getLogger(__name__)

QuestionSource = Union[str, Path, Sequence[Union[str, Path]], Mapping[str, Any]]
"""A file, a folder of sets, several of them, or {path: any of these, options...}."""

INVALID_SOURCES = ("compose_chain_qa_invalid",)
"""Rows of ASearcher-Base whose question has no answer in the corpus: 4,753 of its 35,583."""
Row = dict[str, Any]


@dataclass(frozen=True)
class RowFormat:
    """golds: paths of keys, the first that is present counts. beside: at least one of these keys
    must be there too. ids: the keys that may hold the row's id, in order."""

    name: str
    golds: tuple[str, ...]
    ids: tuple[str, ...] = ("id",)
    beside: tuple[str, ...] = ()

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has a gold answer where this layout has it."""
        return self.gold_path(row) is not None and (
            not self.beside or any(key in row for key in self.beside)
        )

    def gold_path(self, row: Mapping[str, Any]) -> str | None:
        """The path at which the row's gold answers stand, None without one."""
        return next((path for path in self.golds if at_path(row, path) is not None), None)

    def described(self) -> str:
        """How an error names it: `asearcher (answer, with qid or idx)`."""
        beside = f", with {' or '.join(self.beside)}" if self.beside else ""
        return f"{self.name} ({' or '.join(self.golds)}{beside})"


_NESTED = tuple(
    f"{key}.ground_truth{tail}"
    for tail in (".target", "")
    for key in ("reward_model", "reward_spec")
)

ROW_FORMATS: dict[str, RowFormat] = {
    layout.name: layout
    for layout in (
        RowFormat("searchr1", _NESTED, ("id", "extra_info.index")),
        RowFormat("rlinf", ("solutions",)),
        RowFormat("flashrag", ("golden_answers",)),
        RowFormat(
            "asearcher",
            ("answer",),
            ("idx", "qid", "id", "_id", "query_id"),
            ("qid", "idx", "aug_answer", "source"),
        ),
        RowFormat("plain", ("answers", "answer")),
    )
}
"""In the order in which they are tried: Search-R1's rows also have FlashRAG's keys."""


def at_path(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path of keys (`reward_model.ground_truth`), None where there is none."""
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def gold_answers(layout: RowFormat, row: Row) -> tuple[str, list[str]]:
    """(path, gold answers) of a row. Raises BadRow without a gold answer."""
    path = layout.gold_path(row) or layout.golds[0]
    value = at_path(row, path)
    values = value if isinstance(value, list) else [value]
    for item in values:
        if item is not None and (isinstance(item, bool) or not isinstance(item, (str, int, float))):
            raise BadRow(f"'{path}': expected text or a list of texts, found {kind_of(item)}")
    golds = answer_texts(values)
    if not golds:
        raise BadRow(f"no gold answer ('{path}' is missing or empty)")
    return path, golds


def prompt_of(value: Any) -> str | list[dict[str, str]]:
    """A prompt: text, or messages. Raises BadRow."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise BadRow(
        f"'prompt': expected text or a list of {{role, content}} messages, found {kind_of(value)}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def read_tasks(source: QuestionSource, split: str, prompt_template: str = "searchr1") -> list[Task]:
    """The questions of a source as tasks, in file order.

    A row's `prompt` (text or messages) is used verbatim; a row with only `question` is put into
    `prompt_template`. Task.answer is the list of gold answers, Task.id the row's id or
    `{split}-{row}`, Task.metadata all further keys, and `set`, the evaluation set. Options of a
    mapping: see `read_files`. Raises DataError: missing or empty file, unknown layout, bad rows
    (all are counted), a row without a gold answer being bad; ConfigError: unknown options.
    """
    options = dict(source) if isinstance(source, Mapping) else {"path": source}
    paths = options.pop("path", None)
    reserved = ("paths", "split", "prompt_template")
    options = check_options(options, read_files, where=f"environment.{split}", reserved=reserved)
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not isinstance(paths, Sequence) or not paths:
        raise ConfigError(
            f"environment.{split}: expected the path of a file or folder, or several, found "
            f"{paths!r}."
        )
    return read_files(
        [Path(path).expanduser() for path in paths], split, prompt_template, **options
    )


def read_files(
    paths: Sequence[Path],
    split: str,
    prompt_template: str,
    *,
    layout: str | None = None,
    sets: str | Sequence[str] | None = None,
    first: int | None = None,
    skip_bad_rows: bool = False,
    skip_sources: str | Sequence[str] = (),
    rewrite_prompts: bool = False,
) -> list[Task]:
    """The tasks of all files.

    layout: a name in ROW_FORMATS, instead of the one that the rows show. sets: which of a folder's
    evaluation sets, and of a file's rows those of these sets. first: so many rows of each file.
    skip_bad_rows: leave them out with a warning. skip_sources: leave out rows with these values of
    `source`. rewrite_prompts: make prompts from `question` even where a row brings its own.
    """
    if layout is not None and layout not in ROW_FORMATS:
        raise ConfigError(
            f"environment.{split}.layout: expected one of {', '.join(ROW_FORMATS)}, found "
            f"'{layout}'.{did_you_mean(layout, ROW_FORMATS)}"
        )
    if first is not None and first < 1:
        raise ConfigError(f"environment.{split}.first: expected at least 1, found {first}.")
    reader = _Reader(
        split, prompt_template, ROW_FORMATS.get(layout or ""), skip_bad_rows, rewrite_prompts
    )
    tasks: list[Task] = []
    for name, file in _files(paths, split):
        tasks += reader.read(file, name)[:first]
    left_out = [skip_sources] if isinstance(skip_sources, str) else skip_sources
    tasks = [task for task in tasks if task.metadata.get("source") not in left_out]
    if sets is not None:
        tasks = _of_sets(tasks, [sets] if isinstance(sets, str) else sets, split)
    if not tasks:
        raise DataError(
            f"environment.{split}: what is skipped leaves no question of {len(paths)} file(s)."
        )
    _warn_of_invalid(tasks, split)
    return tasks


def _files(paths: Sequence[Path], split: str) -> list[tuple[str, Path]]:
    """(set or nothing, file): the sets of folders, and of files where there are several."""
    found: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir():
            found += find_sets(path, split).items()
        else:
            found.append((set_name(path) if len(paths) > 1 else "", path))
    return found


def _of_sets(tasks: Sequence[Task], sets: Sequence[str], split: str) -> list[Task]:
    known = list(dict.fromkeys(str(task.metadata.get("set", "")) for task in tasks))
    for name in sets:
        if name not in known:
            raise ConfigError(
                f"environment.{split}.sets: no set '{name}' there; found "
                f"{', '.join(known)}.{did_you_mean(name, known)}"
            )
    return [task for task in tasks if task.metadata.get("set") in sets]


def _warn_of_invalid(tasks: Sequence[Task], split: str) -> None:
    count = sum(task.metadata.get("source") in INVALID_SOURCES for task in tasks)
    if count:
        logger.warning(
            "split '%s': %d of %d questions have the source %s, which are unanswerable; leave them "
            "out with skip_sources",
            split, count, len(tasks), INVALID_SOURCES[0],
        )  # fmt: skip


@dataclass(frozen=True)
class _Reader:
    """Reads files one after the other; ids differ over all of them, because they tell groups
    apart."""

    split: str
    prompt_template: str
    layout: RowFormat | None
    skip_bad_rows: bool
    rewrite_prompts: bool
    used: set[str] = field(default_factory=set)

    def read(self, path: Path, set_of_file: str) -> list[Task]:
        """The tasks of one file. set_of_file: where its rows do not name their sets."""
        what = f"{self.split} questions"
        existing(path, f"{what} (environment.{self.split}, --{self.split}-data FILE)")
        rows = list(read_rows(path, what))
        layout = self.layout or _detect(
            path, what, [row for _, row in rows if not isinstance(row, BadRow)]
        )
        tasks: list[Task] = []
        bad: list[tuple[str, str]] = []
        for number, (name, row) in enumerate(rows):
            try:
                if isinstance(row, BadRow):
                    raise row
                tasks.append(self._task(row, number, layout, set_of_file))
            except BadRow as problem:
                bad.append((name, str(problem)))
        refuse(path, what, bad, len(tasks), skip=self.skip_bad_rows)
        return tasks

    def _task(self, row: dict[str, Any], number: int, layout: RowFormat, set_of_file: str) -> Task:
        path, golds = gold_answers(layout, row)
        if row.get("prompt") is not None and not self.rewrite_prompts:
            prompt = prompt_of(row["prompt"])
        elif row.get("question") is not None or self.rewrite_prompts:
            prompt = render_prompt(self.prompt_template, text_of(row, "question"))
        else:
            raise BadRow("no 'prompt' and no 'question'")
        taken = {"prompt", "id", path.partition(".")[0]}
        metadata = {key: value for key, value in row.items() if key not in taken}
        of_set = _set_of_row(row) or set_of_file
        if of_set:
            metadata["set"] = of_set
        ids = (str(value) for path in layout.ids if (value := at_path(row, path)) is not None)
        name = next(ids, "") or f"{self.split}-{number}"
        name = f"{of_set}-{name}" if of_set else name
        unique = name
        while unique in self.used:
            unique, number = f"{name}@{number}", max(number + 1, len(self.used))
        self.used.add(unique)
        return Task(unique, prompt, golds, metadata)


def _set_of_row(row: Mapping[str, Any]) -> str:
    """The set that a row names itself: in `set`, or in Search-R1's `data_source`, which verl
    prefixes."""
    if isinstance(row.get("set"), str):
        return str(row["set"])
    source = row.get("data_source")
    return set_name(source.removeprefix("searchR1_")) if isinstance(source, str) and source else ""


def _detect(path: Path, what: str, rows: Sequence[Mapping[str, Any]]) -> RowFormat:
    """The layout of a file: that of its first row with a gold answer. Raises DataError, which lists
    what was looked for."""
    for row in rows:
        fitting = next((layout for layout in ROW_FORMATS.values() if layout.fits(row)), None)
        if fitting is not None:
            return fitting
    if not rows:
        return ROW_FORMATS["plain"]  # its reader then reports what is wrong with each row
    looked_for = ", ".join(layout.described() for layout in ROW_FORMATS.values())
    found = ", ".join(f"{key} ({kind_of(value)})" for key, value in rows[0].items()) or "nothing"
    raise DataError(
        f"{path}: expected the {what}, found no gold answer in any of {len(rows)} rows. Looked for "
        f"{looked_for}. The first row has {found}. Rename the key or convert the file."
    )
