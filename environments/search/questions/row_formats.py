"""What a row of questions looks like in each release: where its prompt, its gold answers and its id
stand.

searchr1    reward_model.ground_truth.target: PeterJinGo/nq_hotpotqa_train and verl's version; reward_spec...: SkyRL's
rlinf       solutions, text or list: RLinf/Search-R1-Data
flashrag    golden_answers: RUC-NLPIR/FlashRAG_datasets
asearcher   answer, text or list, beside one of qid, idx, aug_answer, source: inclusionAI/ASearcher-train-data, -test-data
plain       answers or answer: anything else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow_environments.common.jsonl import BadRow, kind_of

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
    golds = [str(item) for item in values if item is not None and str(item).strip()]
    if not golds:
        raise BadRow(f"no gold answer ('{path}' is missing or empty)")
    return path, golds


def row_id(layout: RowFormat, row: Row) -> str | None:
    """The row's id, None where it has none."""
    found: Sequence[Any] = [
        value for path in layout.ids if (value := at_path(row, path)) is not None
    ]
    return str(found[0]) if found else None


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
