"""The field's public releases: downloaded from the HuggingFace hub, checked, and unpacked to what
servers and recipes take."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from recipes.searchr1.hub import DownloadError, Hub, RemoteFile
from rlflow.errors import ConfigError, DataError, StorageError, did_you_mean
from rlflow.storage.files import clear_partials, replace_file, replacing, write_text

_BLOCK = 1 << 20


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
    hub = Hub(release.repo, "model" if name in MODELS else "dataset", revision, endpoint)
    patterns = tuple(files) or release.files
    wanted = [
        remote
        for remote in hub.files()
        if any(fnmatch(remote.name, pattern) for pattern in patterns)
    ]
    if not wanted:
        raise DownloadError(f"{release.repo}: no file there matches {', '.join(patterns)}.")
    ledger = _Ledger(folder / "downloads.json")
    parts = None
    if release.joined and not files:
        parts = _Parts(folder / release.joined, wanted, keep_parts)
        if ledger.holds(parts.target, parts.identity):
            say(f"{parts.target}: there and whole")
            return [parts.target]
        wanted = parts.missing()
    for place in {(folder / remote.name).parent for remote in wanted}:
        clear_partials(place)  # what a kill left has the size of an index
    _check_room(folder, wanted, ledger, parts)
    try:
        for remote in wanted:
            _fetch(hub, remote, folder, ledger, say)
        if parts is not None:
            parts.join(ledger, say)
            return [parts.target]
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

    def note(self, file: Path, identity: str, now: Path | None = None) -> None:
        """Notes a file as whole. now: where it lies before it gets its name."""
        self._known[self._name(file)] = [identity, *_stamp(now or file)]
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
    hub: Hub, remote: RemoteFile, folder: Path, ledger: _Ledger, say: Callable[[str], None]
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


def _check_room(
    folder: Path, wanted: Sequence[RemoteFile], ledger: _Ledger, parts: _Parts | None
) -> None:
    """Raises StorageError where the disk has no room for what is missing, and for what is made of
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    missing, made = 0, 0 if parts is None else parts.room()
    for remote in wanted:
        file = folder / remote.name
        partial = _partial(file, _identity([remote]))
        there = next((one.stat().st_size for one in (file, partial) if one.is_file()), 0)
        missing += max(0, remote.size - there)
        unpacked = ledger.holds(*_unpacked_as(file, remote.size))
        if parts is None and file.name.endswith(".jsonl.gz") and not unpacked:
            made += 3 * remote.size  # what text unpacks to, about
    free = shutil.disk_usage(folder).free
    if missing + made > free:
        raise StorageError(
            f"{folder}: {(missing + made) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free. "
            "Give another --save_path."
        )


class _Parts:
    """The parts of one file, joined in the order of their names. What a kill leaves of that is a
    file whose name ends with the number of parts in it."""

    def __init__(self, target: Path, parts: Sequence[RemoteFile], keep: bool) -> None:
        """keep: the parts stay."""
        self.target, self.identity = target, _identity(parts)
        self._keep, self._parts = keep, sorted(parts, key=lambda part: part.name)
        found = (number for number in range(len(parts), 0, -1) if self._path(number).is_file())
        self._joined = next(found, 0)
        whole = self._path(self._joined)
        if whole.is_file():  # a kill may have left the beginning of one more
            os.truncate(whole, sum(part.size for part in self._parts[: self._joined]))

    def missing(self) -> list[RemoteFile]:
        """The parts that are not joined yet."""
        return self._parts[self._joined :]

    def room(self) -> int:
        """Bytes that joining takes beside the parts."""
        if self._keep:
            return sum(part.size for part in self.missing())
        return max((part.size for part in self._parts[max(1, self._joined) :]), default=0)

    def join(self, ledger: _Ledger, say: Callable[[str], None]) -> None:
        """Puts the parts behind each other; each goes once it is there, unless they are kept."""
        for part in self.missing():
            say(f"{self.target}: adding {part.name}")
            whole, source = self._path(self._joined), self.target.with_name(part.name)
            if self._joined or self._keep:
                with whole.open("ab") as joined, source.open("rb") as added:
                    shutil.copyfileobj(added, joined, _BLOCK)
            else:
                whole = source
            self._joined += 1
            replace_file(whole, self._path(self._joined))
            self._clear(part)
        for part in self._parts:  # those that a kill left
            self._clear(part)
        whole = self._path(self._joined)
        ledger.note(self.target, self.identity, whole)
        replace_file(whole, self.target)

    def _clear(self, part: RemoteFile) -> None:
        if not self._keep:
            self.target.with_name(part.name).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.target.with_name(f"{self.target.name}.{self.identity[:12]}.{number}")


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
