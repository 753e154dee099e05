"""Claims about patterns in linear time: they find what `re` finds, and cost what the text is long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError
from rlflow_environments.common.patterns import Pattern

PATTERNS = [
    "ab", "a|b+c", "^a.c", r"\bab\b", r"[^a\n]{2,3}b", "(?i)aB", "(?i:A)b", "(a|b)*?c", "(ab?){2}",
    r"\d\w\s", "a?", "(?m)^b$", "(?s)a.b", r"\Ab", "x{3}", r"\Ba", "(a*)*b", "(|a)+c", "a{0,2}c",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text(alphabet="aAbBcx1_ \n", max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_pattern_is_found_where_re_finds_it(pattern: str, text: str) -> None:
    assert Pattern(pattern).found(text) == (re.search(pattern, text) is not None)


@given(text=st.text(max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_text_can_be_searched(text: str) -> None:
    assert Pattern("é").found(text + "\ud800" + "é")
    assert Pattern("é").found(text) == ("é" in text)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "a*a*a*a*b", r"(\w+\s?)*:"])
def test_patterns_that_make_re_hang_take_linear_time(pattern: str) -> None:
    start = time.process_time()
    assert Pattern(pattern).found("a" * 50_000 + "!") is False
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(a", "missing \\)"),
        (r"(a)\1", "invalid escape sequence"),
        ("a(?=b)", r"invalid perl operator"),
        ("a++", "bad repetition operator"),
        ("a{4000}", "repetition"),
        ("(((){900}){900}){900}", "repetition"),
    ],
)
def test_what_cannot_be_linear_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as found:
        Pattern(pattern, "environment.stages[0]")
    assert str(found.value).startswith("environment.stages[0]: ")
