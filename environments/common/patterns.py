"""Regular expressions that cost time in proportion to the text, by RE2.

`re` backtracks: on a text of the policy's choice, a pattern such as (a+)+$ takes time exponential
in the length."""

from __future__ import annotations

import re2

from rlflow.errors import ConfigError


class Pattern:
    """A regular expression in RE2's syntax (https://github.com/google/re2/wiki/Syntax): Python's
    but for references, lookaround, atomic groups and possessive repeats; `$` is the very end of the
    text, and \\w, \\d and \\s are of ASCII. Raises ConfigError, with `where`."""

    def __init__(self, pattern: str, where: str = "pattern") -> None:
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled = re2.compile(pattern, options)
        except re2.error as problem:
            told = problem.args[0] if problem.args else problem
            told = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
            raise ConfigError(
                f"{where}: '{pattern}': expected a regular expression in RE2's syntax (without "
                f"references, lookaround and possessive repeats), found: {told}."
            ) from None

    def found(self, text: str) -> bool:
        """Whether the pattern occurs anywhere in the text. A lone surrogate counts as '?'."""
        readable = text.encode(errors="replace").decode()
        return self._compiled.search(readable) is not None
