"""The server's socket. It is bound before anything heavy is imported, so that a port in use is
known at once."""

from __future__ import annotations

import contextlib
import errno
import socket

from rlflow.errors import ConfigError

BACKLOG = 4096  # connections that the kernel holds while the event loop is busy


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. port 0 picks a free one. Raises ConfigError, which names who holds the
    port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where the socket names its protocol; otherwise an
    # answer in two parts waits for the client's delayed acknowledgement, 40 ms on Linux.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of clients that vanished without a word; connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as problem:
        listener.close()
        if getattr(problem, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: {host}:{port} is in use{_holder(port)}. Stop that, or take "
                "another port (0 picks a free one)."
            ) from None
        raise ConfigError(f"--host {host} --port {port}: cannot be bound ({problem}).") from None
    return listener


def _holder(port: int) -> str:
    """` by process 123 (name)`, as far as it can be seen."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if (
                local
                and local.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
