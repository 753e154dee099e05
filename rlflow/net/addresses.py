"""This machine's address, and whether a server answers at another."""

from __future__ import annotations

import socket

ELSEWHERE = "192.0.2.1"  # of TEST-NET, RFC 5737


def unreachable(host: str, port: int, timeout_s: float = 3.0) -> str | None:
    """Why no server takes connections there; None where one does."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as failure:
        return str(failure) or type(failure).__name__
    return None


def own_address(towards: str = "") -> str:
    """What other machines call this one that are reached by the same way as `towards`, host:port;
    without a host ("auto"), the address towards the default route. Nothing is sent: the kernel only
    chooses the interface."""
    host, _, port = towards.removeprefix("ray://").rpartition(":")
    host = (host if port.isdecimal() else "").strip("[]") or ELSEWHERE
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
