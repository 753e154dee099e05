"""How clients find servers: one small file per server in a folder that all of them see (ASearcher,
AstraFlow)."""

from __future__ import annotations

import logging
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.http import own_address
from rlflow.storage.files import write_text

logger = logging.getLogger(__name__)

PATTERN = "Host*_IP*.txt"


class DiscoveryFile:
    """`Host{ip}_IP{port}.txt` with the content `ip:port`: there from `write` to `remove`."""

    def __init__(self, folder: str | Path, host: str, port: int) -> None:
        """Makes the folder. host: what the server is bound to. Raises ConfigError where the folder
        cannot be made."""
        address = reachable_address(host)
        self.content = f"{address}:{port}"
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
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:  # removed by its server between the listing and now
            continue
        found.update(line.strip() for line in lines if line.strip())
    return sorted(found)


def reachable_address(host: str) -> str:
    """The address that other machines may use for a server bound to `host`: the machine's own where
    that is a wildcard."""
    return own_address() if host in ("", "0.0.0.0", "::") else host
