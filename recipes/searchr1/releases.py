"""The field's public releases: downloaded from the HuggingFace hub, checked, and unpacked to what
servers and recipes take."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlflow.errors import (
    ConfigError,
    DataError,
    MissingPackageError,
    RLFlowError,
    StorageError,
    did_you_mean,
)
from rlflow.storage.files import clear_partials, replace_file, replacing, write_text

logger = logging.getLogger(__name__)

_BLOCK = 1 << 20


class DownloadError(RLFlowError):
    """The hub cannot be reached, or has not what was asked for."""


@dataclass(frozen=True)
class Release:
    """A dataset repository of the hub, or some of its files (patterns). joined: the name of what
    the parts in `files` make, one behind the other. about: what it is, with its size."""

    repo: str
    about: str
    files: tuple[str, ...] = ("*",)
    joined: str = ""


RELEASES: dict[str, Release] = {
    "wiki-18": Release("PeterJinGo/wiki-18-corpus",
                       "Search-R1's corpus: 21,015,324 passages, 14 GB unpacked", ("*.jsonl.gz",)),
    "wiki-18-e5": Release("PeterJinGo/wiki-18-e5-index",
                          "its E5 index, Flat: 60 GiB", ("part_*",), "e5_Flat.index"),
    "wiki-18-e5-hnsw": Release("PeterJinGo/wiki-18-e5-index-HNSW64",
                               "its E5 index, HNSW64: 71 GB", ("part_*",), "e5_HNSW64.index"),
    "wiki-18-bm25": Release("PeterJinGo/wiki-18-bm25-index", "its BM25 index, for Lucene"),
    "nq-hotpotqa": Release("PeterJinGo/nq_hotpotqa_train",
                           "Search-R1's questions, parquet: 170k training, 51.7k of seven sets"),
    "rlinf-data": Release("RLinf/Search-R1-Data",
                          "RLinf's version of them: train.jsonl with prompt and solutions"),
    "rlinf-wiki": Release("RLinf/Wiki-2018-Corpus",
                          "RLinf's corpus, pages and Qdrant storage: 156 GB"),
    "asearcher-wiki": Release("inclusionAI/ASearcher-Local-Knowledge",
                              "ASearcher's corpus, pages and links: 61 GB"),
    "asearcher-train": Release("inclusionAI/ASearcher-train-data",
                               "ASearcher-Base-35k and -LRM-35k"),
    "asearcher-test": Release("inclusionAI/ASearcher-test-data",
                              "evaluation sets, 1,000 questions each; GAIA, frames, xbench"),
    "flashrag": Release("RUC-NLPIR/FlashRAG_datasets", "the seven evaluation sets, whole",
                        tuple(f"{name}/*.jsonl" for name in
                              ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique",
                               "bamboogle"))),
    "e5": Release("intfloat/e5-base-v2", "the encoder of the field: 0.4 GB"),
}  # fmt: skip
"""What can be asked for by name."""

MODELS = ("e5",)
"""Releases that are model repositories; the others are data sets."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. sha256: of large files (LFS); others are checked by their size."""

    name: str
    size: int
    sha256: str | None


def select(names: Sequence[str]) -> dict[str, Release]:
    """The releases of the names; with a slash: of any dataset repository. Raises ConfigError."""
    chosen: dict[str, Release] = {}
    for name in names:
        if "/" in name:
            known = next((release for release in RELEASES.values() if release.repo == name), None)
            chosen[name] = known or Release(name, "")
        elif name in RELEASES:
            chosen[name] = RELEASES[name]
        else:
            raise ConfigError(
                f"expected releases among {', '.join(RELEASES)}, or OWNER/NAME, found "
                f"'{name}'.{did_you_mean(name, RELEASES)}"
            )
    return chosen


def download(
    name: str,
    release: Release,
    folder: Path,
    *,
    files: Sequence[str] = (),
    revision: str = "main",
    endpoint: str | None = None,
    keep_parts: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Downloads, checks and unpacks a release; returns the files that are ready.

    files: patterns instead of the release's. What is there and whole is not fetched again; a file
    that was stopped in the middle goes on there. Raises DownloadError, DataError (a file is not
    what the hub says), StorageError (no room).
    """
    hub = _Hub(release.repo, "model" if name in MODELS else "dataset", revision, endpoint)
    patterns = tuple(files) or release.files
    wanted = [
        remote
        for remote in hub.files()
        if any(fnmatch(remote.name, pattern) for pattern in patterns)
    ]
    if not wanted:
        raise DownloadError(f"{release.repo}: no file there matches {', '.join(patterns)}.")
    ledger = _Ledger(folder / "downloads.json")
    joined = folder / release.joined if release.joined and not files else None
    if joined is not None and ledger.holds(joined, _identity(wanted)):
        say(f"{joined}: there and whole")
        return [joined]
    for place in {(folder / remote.name).parent for remote in wanted}:
        clear_partials(place)  # what a kill left has the size of an index
    _check_room(folder, wanted, ledger, joined is not None)
    try:
        for remote in wanted:
            _fetch(hub, remote, folder, ledger, say)
        if joined is not None:
            return [_join(wanted, folder, joined, ledger, keep_parts=keep_parts, say=say)]
        return [
            _unpacked(folder / remote.name, ledger, say)
            if remote.name.endswith(".jsonl.gz")
            else folder / remote.name
            for remote in wanted
        ]
    except OSError as problem:
        raise StorageError(
            f"{folder}: cannot be written ({problem}). Make room, or give another --save_path."
        ) from None


class _Hub:
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


class _Ledger:
    """Which files were found whole, so that sixty gigabytes are not hashed at every start: {name:
    [identity, size, mtime]}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def holds(self, file: Path, identity: str) -> bool:
        """Whether the file is there, untouched since it was noted under this identity."""
        return file.is_file() and self._known.get(self._name(file)) == [identity, *_stamp(file)]

    def untouched(self, file: Path) -> bool:
        """Whether the file is there as it was noted last, under whatever identity."""
        return file.is_file() and self._known.get(self._name(file), [])[1:] == _stamp(file)

    def note(self, file: Path, identity: str) -> None:
        self._known[self._name(file)] = [identity, *_stamp(file)]
        write_text(self._path, json.dumps(self._known, indent=1))

    def _name(self, file: Path) -> str:
        return file.relative_to(self._path.parent).as_posix()


def _stamp(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _identity(files: Sequence[RemoteFile]) -> str:
    return hashlib.sha256(
        json.dumps([[remote.name, remote.size, remote.sha256] for remote in files]).encode()
    ).hexdigest()


def _fetch(
    hub: _Hub, remote: RemoteFile, folder: Path, ledger: _Ledger, say: Callable[[str], None]
) -> None:
    """Fetches a file that is not there and whole, and checks it; a damaged one is fetched once
    more."""
    file, identity = folder / remote.name, _identity([remote])
    if ledger.holds(file, identity):
        say(f"{file}: there and whole")
        return
    partial = _partial(file, identity)
    problem = ""
    if file.is_file() and not ledger.untouched(file):  # fetched by other means, or the user's own
        if found := _difference(file, remote):
            raise DataError(
                f"{file}: {found}: not the file of the release. Move it away, or give another "
                "--save_path."
            )
        ledger.note(file, identity)
        say(f"{file}: there and whole")
        return
    for last in (False, True):
        if partial.exists() and partial.stat().st_size > remote.size:
            partial.unlink()
        hub.fetch(remote, partial)
        problem = _difference(partial, remote) or ""
        if not problem:
            replace_file(partial, file)
            ledger.note(file, identity)
            checked = "SHA-256" if remote.sha256 else "size"
            say(f"{file}: {remote.size:,} bytes, {checked} as released")
            return
        partial.unlink()
        say(f"{file}: {problem}" + ("" if last else "; fetched once more"))
    raise DataError(f"{file}: {problem}, twice. The mirror, the network or the disk is at fault.")


def _partial(file: Path, identity: str) -> Path:
    """Another revision's beginning is another file."""
    return file.with_name(f"{file.name}.{identity[:12]}.partial")


def _difference(file: Path, remote: RemoteFile) -> str | None:
    size = file.stat().st_size if file.exists() else 0
    if size != remote.size:
        return f"expected {remote.size:,} bytes, found {size:,}"
    if remote.sha256 is None:
        return None
    found = _sha256(file)
    return None if found == remote.sha256 else f"expected SHA-256 {remote.sha256}, found {found}"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_room(folder: Path, wanted: Sequence[RemoteFile], ledger: _Ledger, joins: bool) -> None:
    """Raises StorageError where the disk has no room for what is missing, and for what is made of
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = made = 0
    for remote in wanted:
        file = folder / remote.name
        partial = _partial(file, _identity([remote]))
        there = next((one.stat().st_size for one in (file, partial) if one.is_file()), 0)
        missing += max(0, remote.size - there)
        unpacked = ledger.holds(*_unpacked_as(file, remote.size))
        if joins:  # parts go once the whole is there
            made += remote.size
        elif file.name.endswith(".jsonl.gz") and not unpacked:
            made += 3 * remote.size  # what text unpacks to, about
    free = shutil.disk_usage(folder).free
    if missing + made > free:
        raise StorageError(
            f"{folder}: {(missing + made) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free. "
            "Give another --save_path."
        )


def _join(
    parts: Sequence[RemoteFile],
    folder: Path,
    target: Path,
    ledger: _Ledger,
    *,
    keep_parts: bool,
    say: Callable[[str], None],
) -> Path:
    """Puts the parts behind each other, in the order of their names. keep_parts: they stay."""
    ordered = sorted(parts, key=lambda part: part.name)
    expected = sum(part.size for part in ordered)
    with replacing(target) as aside:
        with aside.open("wb") as joined:
            for part in ordered:
                say(f"{target}: adding {part.name}")
                with (folder / part.name).open("rb") as source:
                    shutil.copyfileobj(source, joined, _BLOCK)
        if aside.stat().st_size != expected:
            raise DataError(
                f"{target}: expected {expected:,} bytes, found {aside.stat().st_size:,}. Try again."
            )
    ledger.note(target, _identity(parts))
    if not keep_parts:
        for part in ordered:
            (folder / part.name).unlink()
    return target


def _unpacked_as(packed: Path, size: int) -> tuple[Path, str]:
    """(the file without `.gz`, its identity)."""
    return packed.with_suffix(""), f"unpacked {packed.name} {size}"


def _unpacked(packed: Path, ledger: _Ledger, say: Callable[[str], None]) -> Path:
    """The file without `.gz`, unpacked beside it. Raises DataError for a damaged file."""
    target, identity = _unpacked_as(packed, packed.stat().st_size)
    if ledger.holds(target, identity):
        return target
    say(f"{target}: unpacking")
    try:
        with replacing(target) as aside, gzip.open(packed) as source, aside.open("wb") as out:
            shutil.copyfileobj(source, out, _BLOCK)
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise DataError(
            f"{packed}: cannot be unpacked: {problem}. Remove it and try again."
        ) from None
    ledger.note(target, identity)
    return target
