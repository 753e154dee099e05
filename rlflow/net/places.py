"""Places at a server for clients that have yet to say who they are, or what they want."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable


class Places:
    """At most `most` of them. Where all are taken a newcomer gets the oldest place of the address
    that holds the most: silent and slow clients lock out nobody, as an honest one needs its place
    for an instant. For use by several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, tuple[str, float, Callable[[], None]]] = {}

    def take(self, client: Hashable, address: str, hang_up: Callable[[], None]) -> None:
        """Gives a client a place. hang_up: ends its connection, from any thread."""
        held = list(self._held.items())
        if len(held) >= self._most:
            ((worst, _),) = Counter(address for _, (address, *_) in held).most_common(1)
            self._hang_up(next(client for client, (address, *_) in held if address == worst))
        self._held[client] = (address, time.monotonic(), hang_up)

    def leave(self, client: Hashable) -> None:
        """Frees the client's place, if it still has one."""
        self._held.pop(client, None)

    def end(self, after_s: float) -> None:
        """Hangs up on who has held a place for so long."""
        for client, (_, since, _) in list(self._held.items()):
            if time.monotonic() - since > after_s:
                self._hang_up(client)

    def _hang_up(self, client: Hashable) -> None:
        found = self._held.pop(client, None)
        if found is not None:
            found[2]()
