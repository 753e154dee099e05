"""Actions on a page as a policy writes them, a line each."""

from __future__ import annotations

import json
import re

EXPECTED = "click N, type N TEXT, scroll down or scroll up"
LONGEST_TEXT = 500  # characters that are typed
_ACTION = re.compile(r"(click) (\d{1,4})|(type) (\d{1,4})(?: (.*))?|(scroll) (down|up)")


def parse_action(response: str) -> str | None:
    """The call that does the action of a response's first line on a page; None where it holds
    none."""
    line = response.strip("\n").split("\n")[0].strip()
    found = _ACTION.fullmatch(line)
    if found is None:
        return None
    click, clicked, typed, number, text, scroll, where = found.groups()
    if click:
        action = (click, int(clicked), "")
    elif typed:
        action = (typed, int(number), (text or "")[:LONGEST_TEXT])
    else:
        action = (scroll, 0, where)
    return f"rlflow.act({', '.join(map(json.dumps, action))})"
