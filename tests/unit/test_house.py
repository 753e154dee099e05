"""Mechanisms that exist once: who starts processes and threads, who speaks HTTP, what public tables hold."""

from __future__ import annotations

import re

from tests.unit.sources import PACKAGES, files

CLIENTS = {
    "httpx": r"(?m)^\s*(import|from) httpx\b",
    "aiohttp": r"ClientSession\(",
    "urllib": r"(?m)^\s*(import|from) urllib\.request\b",
    "requests": r"(?m)^\s*(import|from) requests\b",
}


def holding(pattern: str) -> list[str]:
    """Files of the product whose text holds the pattern."""
    return [
        str(path)
        for path in files(*PACKAGES)
        if re.search(pattern, path.read_text(encoding="utf-8"))
    ]


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
