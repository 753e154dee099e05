"""Mechanisms that exist once, and what the code costs a reader."""

from __future__ import annotations

import re

import pytest

from tests.house import CONFIG, functions_that_take, functions_to_the_first_step
from tests.unit.sources import PACKAGES, files, text

CLIENTS = {
    "httpx": r"(?m)^\s*(import|from) httpx\b",
    "aiohttp": r"ClientSession\(",
    "urllib": r"(?m)^\s*(import|from) urllib\.request\b",
    "requests": r"(?m)^\s*(import|from) requests\b",
}


def holding(pattern: str) -> list[str]:
    """Files of the product whose text holds the pattern."""
    return [str(path) for path in files(*PACKAGES) if re.search(pattern, text(path))]


def test_one_file_starts_processes() -> None:
    assert len(holding(r"\bPopen\(")) == 1


def test_three_files_start_threads() -> None:
    assert len(holding(r"\bThread\(")) == 3


def test_bytes_of_a_protocol_are_packed_in_two_files() -> None:
    assert len(holding(r"\bimport hmac\b|struct\.Struct\(")) == 2


def test_one_http_client_library_is_used() -> None:
    assert sum(bool(holding(pattern)) for pattern in CLIENTS.values()) == 1


def test_public_tables_name_no_test_double() -> None:
    assert not holding(r'"(fake|sleep)":\s*"rlflow')


def test_few_functions_take_the_whole_configuration() -> None:
    """Each may depend on any key; a part is given its section. The figure only falls: `make house`."""
    assert len(functions_that_take(CONFIG)) <= 25


@pytest.mark.slow
def test_the_way_to_the_first_update_gets_no_longer() -> None:
    """Named functions from `train` to the first optimizer step, and their files. A new family or
    capability that each start passes through may raise them; nothing else."""
    called = functions_to_the_first_step()
    assert 400 < len(called) <= 875
    assert len({file for file, _ in called}) <= 122
