"""The result of a contract check, as text for people."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ContractReport:
    """Breaches of the contract, notes on what is allowed but worth knowing, and facts."""

    breaches: dict[str, tuple[str, int]] = field(default_factory=dict)
    """{kind: (the first one's text, their number)}"""
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def breach(self, text: str, kind: str = "") -> None:
        """Adds a breach, which is told once with the number of its kind."""
        first, count = self.breaches.get(kind or text, (text, 0))
        self.breaches[kind or text] = first, count + 1

    def expect(self, holds: object, text: str) -> bool:
        """Whether it holds; else it is a breach."""
        if not holds:
            self.breach(text)
        return bool(holds)

    def note(self, text: str) -> None:
        """Adds a note, each text once."""
        if text not in self.notes:
            self.notes.append(text)

    def fact(self, text: str) -> None:
        self.facts.append(text)

    @property
    def problems(self) -> list[str]:
        """The breaches in words."""
        found = self.breaches.values()
        return [text + (f" ({count} times)" if count > 1 else "") for text, count in found]

    @property
    def passed(self) -> bool:
        return not self.breaches

    def __str__(self) -> str:
        lines = [f"  {fact}" for fact in self.facts]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  PROBLEM: {problem}" for problem in self.problems]
        count = len(self.breaches)
        holds = "the contract holds" + ("; see the notes" if self.notes else "")
        verdict = holds if self.passed else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join([*lines, verdict])
