"""What HTTP clients share."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_RETRY_AFTER_S = 30.0


def retry_after_s(headers: Mapping[str, str], longest_s: float) -> float:
    """The seconds of Retry-After, at most `longest_s`; 0 without them, and for its other form, a date."""
    try:
        return min(longest_s, max(0.0, float(headers.get("retry-after", ""))))
    except ValueError:
        return 0.0
