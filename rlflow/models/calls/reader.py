"""Calls of tools in the text of a response, in the form of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlflow.models.calls import FORMS
from rlflow.models.calls.form import CallForm, TextCall, Tools

THINKING, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class ReadResponse:
    """content: the text around the calls. found: the calls in order, None for one that cannot be
    read, which stays part of the content, as does one that begins and does not end (unclosed).
    shape: what one that failed should have looked like."""

    content: str
    found: tuple[TextCall | None, ...] = ()
    unclosed: bool = False
    shape: str = field(default="", compare=False)

    @property
    def calls(self) -> list[TextCall]:
        """Those that can be read."""
        return [call for call in self.found if call is not None]

    @property
    def failed(self) -> int:
        """How many cannot."""
        return self.found.count(None) + self.unclosed


@dataclass(frozen=True)
class CallReader:
    """Reads the calls of a policy's responses.

    form: of the model's chat template; None: not known, each form is known by what its calls begin
    with. in_thought: whether the generation prompt opens the model's thinking; None: not known,
    what stands in front of </think> is thinking."""

    form: CallForm | None = None
    in_thought: bool | None = None

    def read(self, text: str, tools: Tools = ()) -> ReadResponse:
        """The calls of a response, and the text around them. What the model only thought is no
        call. tools: arguments that the form writes as text get the types of their schemas."""
        start = self._thought(text)
        forms = FORMS if self.form is None else (self.form,)
        whole = text[start:].strip()
        for form in forms:
            calls = form.whole(whole, self.form is not None) if form.whole else None
            if calls is not None:
                content = text[:start].strip() if any(calls) else text
                return ReadResponse(content, tuple(calls), shape=form.shape)
        return _read_marked(text, start, forms, tools, sure=self.form is None)

    def _thought(self, text: str) -> int:
        """Where the thinking that a response begins with ends."""
        begun = text.lstrip().startswith(THINKING)
        if self.in_thought is None and not begun:
            return text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
        if not (self.in_thought or begun):
            return 0
        end = text.find(THOUGHT)
        return len(text) if end < 0 else end + len(THOUGHT)


def _read_marked(
    text: str, start: int, forms: Sequence[CallForm], tools: Tools, sure: bool
) -> ReadResponse:
    """The calls that begin with a mark, behind the thinking in front of `start`. sure: by marks
    that no other form has."""
    marked = [form for form in forms if form.opening]
    openings = [(form.sure if sure else "") or form.opening for form in marked]
    # Thinking may follow a call; a call may quote it
    opening = re.compile("|".join(f"({one})" for one in (THINKING, *openings)))
    kept = [text[:start]]
    found: list[TextCall | None] = []
    unclosed = False
    shape = ""
    while match := opening.search(text, start):
        if match.lastindex == 1:
            end = text.find(THOUGHT, match.end())
            stop = len(text) if end < 0 else end + len(THOUGHT)
            kept.append(text[start:stop])
            start = stop
            continue
        form = marked[(match.lastindex or 0) - 2]
        assert form.read is not None, "a form with an opening"
        reading = form.read(text, match.end(), tools)
        found += reading.found
        unclosed = reading.unclosed
        if unclosed or None in reading.found:
            shape = form.shape
        if unclosed and not any(reading.found):
            break
        kept.append(text[start : match.start() if any(reading.found) else reading.stop])
        start = reading.stop
    content = "".join(kept) + text[start:]
    return ReadResponse(
        content.strip() if any(found) else content, tuple(found), unclosed, shape=shape
    )
