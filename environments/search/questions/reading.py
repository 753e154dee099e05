"""Questions as tasks, from one file, several files, or a folder of evaluation sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from rlflow.components import check_options
from rlflow.errors import ConfigError, DataError, did_you_mean
from rlflow.types import Task
from rlflow_environments.common.jsonl import BadRow, existing, kind_of, refuse, text_of
from rlflow_environments.search.protocols.text import render_prompt
from rlflow_environments.search.questions.row_formats import (
    ROW_FORMATS,
    RowFormat,
    gold_answers,
    prompt_of,
    row_id,
)
from rlflow_environments.search.questions.sets import find_sets, set_name
from rlflow_environments.search.questions.tables import read_rows

logger = logging.getLogger(__name__)

QuestionSource = Union[str, Path, Sequence[Union[str, Path]], Mapping[str, Any]]
"""A file, a folder of sets, several of them, or {path: any of these, options...}."""

MARK = "answerable"
"""Key of a row: whether its question can be answered from the corpus (`rlflow search
check-questions`)."""

INVALID_SOURCES = ("compose_chain_qa_invalid",)
"""Rows of ASearcher-Base whose question has no answer in the corpus: 4,753 of its 35,583."""


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
    skip_unanswerable: bool = False,
    rewrite_prompts: bool = False,
) -> list[Task]:
    """The tasks of all files.

    layout: a name in ROW_FORMATS, instead of the one that the rows show. sets: which of a folder's
    evaluation sets, and of a file's rows those of these sets. first: so many rows of each file.
    skip_bad_rows: leave them out with a warning. skip_sources: leave out rows with these values of
    `source`. skip_unanswerable: leave out rows that `rlflow search check-questions` marked.
    rewrite_prompts: make prompts from `question` even where a row brings its own.
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
    if skip_unanswerable:
        tasks = _answerable(tasks, split)
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


def _answerable(tasks: Sequence[Task], split: str) -> list[Task]:
    marks = [task.metadata.get(MARK) for task in tasks]
    if not all(isinstance(mark, bool) for mark in marks):
        missing = sum(not isinstance(mark, bool) for mark in marks)
        raise ConfigError(
            f"environment.{split}.skip_unanswerable: {missing} of {len(tasks)} questions have no "
            f"mark '{MARK}', true or false. Make the file with `rlflow search check-questions ... "
            "--out FILE`."
        )
    kept = [task for task, mark in zip(tasks, marks, strict=True) if mark]
    logger.info(
        "split '%s': %d of %d questions are left out as unanswerable",
        split,
        len(tasks) - len(kept),
        len(tasks),
    )
    return kept


def _warn_of_invalid(tasks: Sequence[Task], split: str) -> None:
    count = sum(task.metadata.get("source") in INVALID_SOURCES for task in tasks)
    if count:
        logger.warning(
            "split '%s': %d of %d questions have the source %s, which are unanswerable; leave them "
            "out with skip_sources",
            split, count, len(tasks), INVALID_SOURCES[0],
        )  # fmt: skip


class _Reader:
    """Reads files one after the other; ids differ over all of them, because they tell groups
    apart."""

    def __init__(
        self,
        split: str,
        prompt_template: str,
        layout: RowFormat | None,
        skip_bad_rows: bool,
        rewrite_prompts: bool,
    ) -> None:
        self._split = split
        self._prompt_template = prompt_template
        self._layout = layout
        self._skip_bad_rows = skip_bad_rows
        self._rewrite_prompts = rewrite_prompts
        self._used: set[str] = set()

    def read(self, path: Path, set_of_file: str) -> list[Task]:
        """The tasks of one file. set_of_file: where its rows do not name their sets."""
        what = f"{self._split} questions"
        existing(path, f"{what} (environment.{self._split}, --{self._split}-data FILE)")
        rows = list(read_rows(path, what))
        layout = self._layout or _detect(
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
        refuse(path, what, bad, len(tasks), skip=self._skip_bad_rows)
        return tasks

    def _task(self, row: dict[str, Any], number: int, layout: RowFormat, set_of_file: str) -> Task:
        path, golds = gold_answers(layout, row)
        if row.get("prompt") is not None and not self._rewrite_prompts:
            prompt = prompt_of(row["prompt"])
        elif row.get("question") is not None or self._rewrite_prompts:
            prompt = render_prompt(self._prompt_template, text_of(row, "question"))
        else:
            raise BadRow("no 'prompt' and no 'question'")
        taken = {"prompt", "id", path.partition(".")[0]}
        metadata = {key: value for key, value in row.items() if key not in taken}
        of_set = _set_of_row(row) or set_of_file
        if of_set:
            metadata["set"] = of_set
        name = row_id(layout, row) or f"{self._split}-{number}"
        name = f"{of_set}-{name}" if of_set else name
        unique = f"{name}@{number}" if name in self._used else name
        self._used.add(unique)
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
            logger.debug("%s: %s in the layout %s", path, what, fitting.name)
            return fitting
    if not rows:
        return ROW_FORMATS["plain"]  # its reader then reports what is wrong with each row
    looked_for = ", ".join(layout.described() for layout in ROW_FORMATS.values())
    found = ", ".join(f"{key} ({kind_of(value)})" for key, value in rows[0].items()) or "nothing"
    raise DataError(
        f"{path}: expected the {what}, found no gold answer in any of {len(rows)} rows. Looked for "
        f"{looked_for}. The first row has {found}. Rename the key or convert the file."
    )
