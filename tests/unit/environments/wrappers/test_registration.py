"""Claims about the wrappers' names and their page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rlflow.components import ENVIRONMENT
from rlflow_environments.wrappers.improve import ImprovePrompts
from rlflow_environments.wrappers.intrinsic import IntrinsicRewards
from rlflow_environments.wrappers.progress import ProgressRewards
from rlflow_environments.wrappers.revisit import RevisitFailures
from rlflow_environments.wrappers.rubric import RubricRewards
from rlflow_environments.wrappers.stages import StageRewards
from tests.unit.test_docs import documented_default

WRAPPERS = {
    "improve": ImprovePrompts,
    "intrinsic": IntrinsicRewards,
    "progress": ProgressRewards,
    "revisit": RevisitFailures,
    "rubric": RubricRewards,
    "stages": StageRewards,
}
ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_known_by_its_name(name: str) -> None:
    assert ENVIRONMENT.resolve(name) is WRAPPERS[name]


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_page_lists_every_keyword_with_its_default(name: str) -> None:
    page = (ROOT / "docs" / "reward_wrappers.md").read_text(encoding="utf-8")
    rows = dict(re.findall(rf"^\| `{name}`: `(\w+)` \| `?(.*?)`? \|", page, flags=re.M))
    parameters = list(inspect.signature(WRAPPERS[name]).parameters.values())[1:]
    wanted = {
        one.name: "required" if one.default is one.empty else documented_default(one.default)
        for one in parameters
    }
    assert rows == wanted
