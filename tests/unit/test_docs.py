"""The docs are true: every configuration key with its default, every metric, every link."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.commands import cli
from rlflow.components import ENVIRONMENT
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


def test_the_api_page_says_what_the_docstrings_say() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "api_page.py"))
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert script["page"]() == written, "make docs"
    rows = dict(script["methods"](Documented))
    assert rows == {"halved(number)": "Half of a number", "name": "Its name"}
    assert script["fields"](Documented) == [("size: int", "metres"), ("tag: str", "")]
    assert script["shown_signature"](test_relative_links_lead_to_files) == "(page)"


@dataclasses.dataclass
class Documented:
    """For the test above."""

    size: int  # metres
    tag: str = ""

    def halved(self, number: float) -> float:
        """Half of a number. Never more."""
        return number / 2

    def undocumented(self) -> None: ...

    @property
    def name(self) -> str:
        """Its name."""
        return self.tag


def commands_of(page: Path) -> list[str]:
    """The commands of rlflow in a page's blocks, without comments, each in one line."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    lines = [
        part.strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        for part in re.split(r"&&|\|", line)
    ]
    return [
        line for line in lines if line.startswith("rlflow ") and not re.search(r"\.\.\.|\$", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_are_commands(page: Path) -> None:
    for line in commands_of(page):
        cli.parse(shlex.split(line, comments=True)[1:])


def test_commands_of_pages_are_found_for_that_test() -> None:
    named = {page.name: len(commands_of(page)) for page in PAGES}
    assert named["prompts_and_reward.md"] >= 5 and named["train_your_agent.md"] >= 4


def test_troubleshooting_names_keys_and_metrics_that_there_are() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sections = {section.name for section in dataclasses.fields(RunConfig())}
    keys = [key for key in re.findall(r"`([a-z]+\.[\w.]+)", text) if key.split(".")[0] in sections]
    known = {*schema_rows(), *("rollout.engine.kv_tokens", "rollout.engine.max_concurrency"),
             *("rollout.engine.arguments", "trainer.optimizer.offload", "rollout.faults.max_aborted_share")}  # fmt: skip
    assert len(keys) > 20 and not set(keys) - known
    metrics = re.findall(r"`((?:train|rollout|memory)/\w+)`", text)
    assert metrics and not set(metrics) - set(METRICS)


def test_the_page_of_prompts_and_rewards_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "prompts_and_reward.md").read_text(encoding="utf-8")
    snippets = dict(re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.S))
    assert set(snippets) == {"train.jsonl", "my_reward.py", "trl_reward.py"}
    for name, snippet in snippets.items():
        (tmp_path / name).write_text(snippet)
    monkeypatch.chdir(tmp_path)
    rewards = ["my_reward.py:reward", "trl_reward.py:exact"]
    options = {"name": "dataset", "train": "train.jsonl", "reward": rewards}
    environment = ENVIRONMENT.build(options)
    report = check_environment(environment, episodes=2)
    assert report.passed, str(report)
    documented = re.findall(r"^\| (`.*?) \|", text.partition("## Options")[2], flags=re.M)
    names = [name for cell in documented for name in re.findall(r"`(\w+)`", cell)]
    assert names == [*inspect.signature(type(environment)).parameters]


def test_the_rows_of_the_page_of_fine_tuning_are_of_every_form(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sft.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"<!-- test: rows.jsonl -->\n```\w+\n(.*?)```", text, flags=re.S)
    (tmp_path / "rows.jsonl").write_text(rows)
    environment = ENVIRONMENT.build({"name": "recordings", "val": str(tmp_path / "rows.jsonl")})
    recordings = [task.recording for task in environment.tasks("val")]
    forms = {
        (len(one.messages), one.context, tuple(flag for _, flag in one.texts)) for one in recordings
    }
    assert forms == {(2, 0, ()), (2, 1, ()), (0, 0, (False, True)), (0, 0, (True,))}


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
