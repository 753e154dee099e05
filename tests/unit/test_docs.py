"""The docs are true: every configuration key with its default, every metric, every link."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlflow.config.schema import RunConfig
from rlflow.report.metrics import METRICS, Metric

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, (dict, list)):
        return json.dumps(value).replace('"', "")
    return str(value) if value != "" else '""'


def schema_rows() -> dict[str, str]:
    rows = {}
    config = RunConfig()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            for key in dataclasses.fields(value):
                rows[f"{section.name}.{key.name}"] = documented_default(getattr(value, key.name))
        else:
            rows[section.name] = documented_default(value)
    return rows


def test_configuration_page_lists_every_key_with_its_default_and_no_other() -> None:
    text = (
        (ROOT / "docs" / "configuration.md")
        .read_text(encoding="utf-8")
        .split("## The search environment")[0]
    )
    assert dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", text, flags=re.M)) == schema_rows()


def test_configuration_page_lists_every_keyword_of_the_search_environment() -> None:
    from rlflow_environments.search import SearchEnvironment

    section = (
        (ROOT / "docs" / "configuration.md")
        .read_text(encoding="utf-8")
        .split("## The search environment")[1]
    )
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, flags=re.M)
    listed = {
        name: default.strip("`")
        for names, default in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    parameters = inspect.signature(SearchEnvironment).parameters.values()
    assert listed == {one.name: documented_default(one.default) for one in parameters}


def test_metrics_page_holds_the_table_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "metrics_table.py"))
    metrics_table, installed = script["metrics_table"], script["installed_metrics"]
    assert metrics_table(installed()) in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in metrics_table() for name in METRICS)
    score = Metric("share", "of tasks", score=True)
    longest = Metric("steps", "longest walk", "max")
    table = metrics_table({"maze": {"exact_match": score, "longest": longest}})
    core, _, own = table.partition("## maze")
    assert core.strip() == metrics_table().strip()
    assert "| `exact_match` | share | of tasks (score) |" in own
    assert "| `longest` | steps | longest walk (max) |" in own
    both = metrics_table({"maze": {"longest": longest}, "cave": {"longest": longest}})
    row = "| `longest` | steps | longest walk (max) |"
    assert both.partition("## maze, cave\n\n")[2].splitlines() == [*own.splitlines()[2:4], row]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"(?<![\w/.])((?:recipes|tests|docs|constraints|tools|benchmarks|\.ci)/[\w./-]*\w)",
            text,
        )
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


SPOKEN = (".md", ".py", ".sh", ".yaml", ".txt")
FOLDERS = ("docs", "rlflow", "environments", "recipes", "tools", "benchmarks", "tests")
TEXTS = [path for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
         if path.suffix in SPOKEN and path.is_file() and path != Path(__file__).resolve()]  # fmt: skip


def test_nothing_says_to_install_a_package_of_this_name_from_the_index() -> None:
    """`rlflow` in the public package index is another project's; `rlflow[x] @ SOURCE` names the source."""
    named = re.compile(r"pip install(?: -[\w-]+)* +['\"]?rlflow\b(?![^\n]* @ )")
    found = [
        str(path.relative_to(ROOT))
        for path in TEXTS
        if named.search(path.read_text(encoding="utf-8"))
    ]
    assert len(TEXTS) > 500 and not found
    assert all(
        named.search(text)
        for text in ("pip install 'rlflow[ray]'", "pip install rlflow", "pip install -U rlflow")
    )
    assert not named.search("pip install 'PATH_OR_GIT_URL[ray]'") and not named.search(
        "pip install 'rlflow[ray] @ {source}'"
    )
