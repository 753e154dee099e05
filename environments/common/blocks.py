"""Text between tags, found in time linear in the text: policies and pages may hold thousands of
tags that are never closed."""

from __future__ import annotations


def blocks(tag: str, text: str) -> list[str]:
    """The contents of every `<tag>...</tag>`, each from an opening to the first closing after it,
    in order.

    What the pattern `<tag>(.*?)</tag>` finds; that one reads the rest of the text anew for every
    opening without a closing.
    """
    found: list[str] = []
    span = block_span(tag, text)
    while span is not None:
        found.append(text[span[0] : span[1]])
        span = block_span(tag, text, span[1])
    return found


def block_span(tag: str, text: str, start: int = 0) -> tuple[int, int] | None:
    """(start, stop) of the content of the first `<tag>...</tag>` that opens at `start` or later;
    None without one."""
    opening = f"<{tag}>"
    place = text.find(opening, start)
    stop = text.find(f"</{tag}>", place + len(opening)) if place >= 0 else -1
    return (place + len(opening), stop) if stop >= 0 else None
