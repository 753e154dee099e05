"""The import rules of the environments: retrieval is a service of its own, and knows neither agents nor the training library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sources import ROOT
from tests.unit.sources import files as sources
from tests.unit.test_layering import core_part, imported

Rule = tuple[set[str], set[str]]
"""(what a room may import from the core, which other rooms of environments/)."""
AN_ENVIRONMENT: Rule = (
    {"errors", "types", "storage", "components", "values", "report", "environment"},
    {"common"},
)
"""Of a room that the table does not name."""
# `devices`: products whose rows do not depend on the size of their batch, which scans need as rollouts do.
ALLOWED: dict[str, Rule] = {
    "common": ({"errors", "net", "types", "storage", "components", "values", "models"}, set()),
    "retrieval": (
        {
            "errors",
            "net",
            "types",
            "storage",
            "components",
            "values",
            "devices",
        },
        {"common"},
    ),
    # Environments over any other environment: none of them knows which.
    "wrappers": (
        {"errors", "types", "storage", "components", "values", "report", "environment", "net"},
        {"common"},
    ),
    # Programs of others, confined; and environments whose policies write some.
    "sandbox": ({"errors", "values"}, set()),
    "sandboxed": (
        {"errors", "types", "values", "report", "environment"},
        {"common", "sandbox", "tool_use"},
    ),
    # The turns of environments whose policies call tools.
    "tool_use": (
        {"errors", "types", "components", "values", "report", "environment", "net"},
        {"common"},
    ),
    # Web pages in a real browser.
    "browser": ({"errors", "net", "types", "storage", "values", "report", "environment"}, set()),
    # An address at which agents ask the policy, in the vendors' interfaces.
    "endpoint": ({"errors", "types"}, {"common"}),
    # Agents of the user's own, in processes or in this one.
    "program": (
        {
            "errors",
            "types",
            "values",
            "report",
            "environment",
            "components",
            "storage",
            "net",
        },
        {"common", "endpoint"},
    ),
    # Environments of other libraries, some of which bring agents of their own.
    "adapters": (
        {
            "errors",
            "net",
            "types",
            "storage",
            "components",
            "values",
            "report",
            "environment",
        },
        {"common", "endpoint", "tool_use", "program"},
    ),
    # `commands`, `config`: `rlflow sft` is `rlflow train` with its own defaults.
    "dataset": (
        {
            "errors",
            "types",
            "storage",
            "components",
            "values",
            "report",
            "environment",
            "commands",
            "config",
        },
        {"common"},
    ),
    # Filters of groups, which play what others said.
    "swarm": (
        {
            "errors",
            "types",
            "storage",
            "components",
            "values",
            "net",
            "algorithms",
            "rollout",
        },
        set(),
    ),
    # What `rlflow doctor` says of the environments.
    "jobs": ({"errors", "commands"}, {"browser"}),
    # `commands`: what its command-line options and jobs of `doctor` are registered as. `config`: what it makes of other systems'
    # files.
    "search": (
        {
            "errors",
            "net",
            "types",
            "storage",
            "components",
            "values",
            "report",
            "environment",
            "commands",
            "config",
        },
        {"common", "retrieval"},
    ),
}
HUB = {
    "environments/retrieval/encoders/transformer.py",
    "recipes/searchr1/hub.py",
    "rlflow/models/hub.py",
}


def names(room: str) -> list[tuple[Path, int, str]]:
    return [
        (path, line, name)
        for path in sources(f"environments/{room}")
        for line, name in imported(path)
    ]


ROOMS = sorted(
    {path.relative_to(ROOT / "environments").parts[0] for path in sources("environments")}
    - {"__init__.py"}
)


def test_every_rule_is_of_a_room() -> None:
    assert set(ALLOWED) < set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_the_core_what_its_rule_says(room: str) -> None:
    allowed = ALLOWED.get(room, AN_ENVIRONMENT)[0] | {"texts"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, line, name in names(room)
        if core_part(name) is not None
        and core_part(name) not in allowed
        and name != "rlflow.__version__"
    ]
    assert not wrong, f"{room} may import {sorted(allowed)} from rlflow:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    _, below = ALLOWED.get(room, AN_ENVIRONMENT)
    others = {f"rlflow_environments.{other}" for other in (*below, room)}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, line, name in names(room)
        if name.startswith("rlflow_environments") and ".".join(name.split(".")[:2]) not in others
    ]
    assert not wrong, f"{room} may import {sorted(below) or 'no other room'}:\n" + "\n".join(wrong)


def test_of_the_tools_environments_know_the_forms_of_env_new() -> None:
    known = {
        (path.name, name.rpartition(".")[0])
        for room in ROOMS
        for path, _, name in names(room)
        if name.startswith("rlflow_tools")
    }
    assert known == {("scaffold.py", "rlflow_tools.kit.scaffold")}


def test_the_environment_asks_the_world_through_one_function() -> None:
    world = ROOT / "environments" / "search" / "world"
    asked = {
        name
        for path, _, name in names("search")
        if not path.is_relative_to(world) and ".search.world" in f".{name}"
    }
    assert len(asked) == 1, asked


def test_the_hub_is_reached_from_three_files() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in sources("environments", "recipes", "tools", "rlflow")
        for _, name in imported(path)
        if name.split(".")[0] == "huggingface_hub"
    }
    assert found == HUB
