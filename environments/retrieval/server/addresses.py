"""A server's listening socket, and the files by which clients find servers: one per server in a
folder that all of them see (ASearcher, AstraFlow).

The socket is bound before anything heavy is imported, so that a port in use is known at once."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.net.addresses import own_address
from rlflow.storage.files import write_text

logger = logging.getLogger(__name__)

BACKLOG = 4096  # connections that the kernel holds while the event loop is busy
FILES_WANTED = 65_536
PATTERN = "Host*_IP*.txt"


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
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == "LISTEN" and one.pid:
                return f" by process {one.pid} ({psutil.Process(one.pid).name()})"
    return ""


def allow_many_files() -> None:
    """Raises this process's limit of open files, of which each connection is one, as far as it may;
    says so where that is little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if 0 <= soft < wanted:  # infinity is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if max(soft, wanted) < 4096:
        told = "only %d files may be open, one per connection: raise `ulimit -Hn` for more clients"
        logger.warning(told, wanted)


class DiscoveryFile:
    """`Host{ip}_IP{port}.txt` with the content `ip:port`: there from `write` to `remove`."""

    def __init__(self, folder: str | Path, host: str, port: int) -> None:
        """Makes the folder. host: what the server is bound to. Raises ConfigError where the folder
        cannot be made."""
        wildcard = host in ("", "0.0.0.0", "::")  # others need the machine's own address
        address = own_address() if wildcard else host
        self.content = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.path = Path(folder).expanduser() / f"Host{address}_IP{port}.txt"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"--save-address-to {folder}: cannot be made ({problem}).") from None

    def write(self) -> None:
        """Writes the file, whole at once. Raises ConfigError where that is not possible: nobody
        would find the server."""
        try:
            write_text(self.path, self.content, durable=False)
        except OSError as problem:
            raise ConfigError(
                f"--save-address-to: {self.path} cannot be written ({problem.strerror})."
            ) from None
        logger.info("discovery file: %s", self.path)

    def remove(self) -> None:
        """Removes the file, if it is there."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as problem:
            logger.warning(
                "the discovery file %s cannot be removed (%s)", self.path, problem.strerror
            )


def read_addresses(folder: str | Path) -> list[str]:
    """The `host:port` of every discovery file of a folder, sorted, each once; files may hold
    several lines."""
    found: set[str] = set()
    for path in Path(folder).expanduser().glob(PATTERN):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # removed by its server between the listing and now
            continue
        found.update(line.strip() for line in lines if line.strip())
    return sorted(found)
