"""Actions on a page as a policy writes them, a line each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

EXPECTED = "click N, type N TEXT, scroll down or scroll up"
LONGEST_TEXT = 500  # characters that are typed
_ACTION = re.compile(r"(click) (\d{1,4})|(type) (\d{1,4})(?: (.*))?|(scroll) (down|up)")


@dataclass(frozen=True)
class PageAction:
    """kind: click, type or scroll. number: of the element. text: what is typed, or where to
    scroll."""

    kind: str
    number: int = 0
    text: str = ""

    @property
    def script(self) -> str:
        """The call that does it on a page."""
        return f"rlflow.act({json.dumps(self.kind)}, {self.number}, {json.dumps(self.text)})"


def parse_action(response: str) -> PageAction | None:
    """The action of a response's first line; None where it holds none."""
    line = response.strip("\n").split("\n")[0].strip()
    found = _ACTION.fullmatch(line)
    if found is None:
        return None
    click, clicked, typed, number, text, scroll, where = found.groups()
    if click:
        return PageAction("click", int(clicked))
    if typed:
        return PageAction("type", int(number), (text or "")[:LONGEST_TEXT])
    return PageAction(scroll, text=where)
