"""Files of the HuggingFace hub, fetched with huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlflow.errors import MissingPackageError, RLFlowError


class DownloadError(RLFlowError):
    """The hub cannot be reached, or has not what was asked for."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. sha256: of large files (LFS); others are checked by their size."""

    name: str
    size: int
    sha256: str | None


class Hub:
    """One repository of the hub. huggingface_hub does the transfer, with retries and progress."""

    def __init__(self, repo: str, kind: str, revision: str, endpoint: str | None) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise MissingPackageError(
                "downloads need the package huggingface_hub. Install it with: pip install "
                "huggingface_hub"
            ) from None
        self._hub = huggingface_hub
        self._repo, self._kind, self._revision, self._endpoint = repo, kind, revision, endpoint

    def files(self) -> list[RemoteFile]:
        """The repository's files. Raises DownloadError."""
        api = self._hub.HfApi(endpoint=self._endpoint)
        info = self._reached(
            lambda: api.repo_info(
                self._repo, repo_type=self._kind, revision=self._revision, files_metadata=True
            )
        )
        return [
            RemoteFile(
                entry.rfilename, int(entry.size or 0), entry.lfs.sha256 if entry.lfs else None
            )
            for entry in info.siblings or []
        ]

    def fetch(self, remote: RemoteFile, partial: Path) -> None:
        """Adds to `partial` what it lacks of a file. Raises DownloadError; what has come by then
        stays."""
        self._reached(lambda: self._transfer(remote, partial))

    def _transfer(self, remote: RemoteFile, partial: Path) -> None:
        # hf_hub_download would begin again after every kill; its own transfer function goes on
        # where it is told to.
        from huggingface_hub.file_download import http_get

        kind = {"repo_type": self._kind, "revision": self._revision, "endpoint": self._endpoint}
        url = self._hub.hf_hub_url(self._repo, remote.name, **kind)
        headers = self._hub.utils.build_hf_headers()
        location = self._hub.get_hf_file_metadata(url, endpoint=self._endpoint).location
        if urlsplit(location).netloc != urlsplit(url).netloc:
            # The account's token is for the hub, not for its storage
            headers.pop("authorization", None)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as file:
            http_get(
                location,
                file,
                resume_size=partial.stat().st_size,
                headers=headers,
                expected_size=remote.size,
            )

    def _reached(self, ask: Callable[[], Any]) -> Any:
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )

        from rlflow.models.hub import transport_errors

        own = (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled)
        try:
            return ask()
        except (*own, *transport_errors()) as problem:  # ValueError: a file over 50 GB
            reason = " ".join(str(problem).split())[:300] or type(problem).__name__
            raise DownloadError(
                f"{self._repo}: {reason}. Check the name, the network, HF_ENDPOINT and HF_TOKEN; "
                "the same command goes on later."
            ) from None
