"""Checksums of files: JSON documents that carry their own, and manifests, which list other files.

{..., "files": {name: {"bytes": 704, "xxh3": "0f3a...", "sha256": "..."}}, "crc32": "9b0c2d4e"}

sha256 is there where it was asked for, and crc32 in place of xxh3 where an earlier version wrote
the manifest."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rlflow.errors import DamagedCheckpointError
from rlflow.storage.files import plain, write_json

TRAINER_MANIFEST = "trainer.json"
"""Of a trainer's checkpoint; written last."""
EXPORT_MANIFEST = "manifest.json"
"""Of a directory that an export or a conversion wrote: what it was made of, and its files; written
last."""
SEAL = "crc32"
BLOCK_BYTES = 2**22


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh3": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
    "crc32": lambda: _Crc32(),
}
"""Checksums by their names in manifests."""
ACCIDENTS = ("xxh3",)
FORGERIES = ("xxh3", "sha256")


class Fingerprint(NamedTuple):
    """What a file must look like. xxh3 finds accidents (a flipped bit, a lost block), sha256
    forgeries too."""

    size: int  # bytes
    checksums: Mapping[str, str]
    """{name of ALGORITHMS: hexadecimal digits}"""


class Hasher:
    """The fingerprint of a file from its bytes, in order."""

    def __init__(self, algorithms: Iterable[str] = ACCIDENTS) -> None:
        self._size = 0
        self._running = {name: ALGORITHMS[name]() for name in algorithms}

    def update(self, data: Any) -> None:
        self._size += memoryview(data).nbytes
        for running in self._running.values():
            running.update(data)

    def fingerprint(self) -> Fingerprint:
        checksums = {name: running.hexdigest() for name, running in self._running.items()}
        return Fingerprint(self._size, checksums)


def fingerprint(path: Path, algorithms: Iterable[str] = ACCIDENTS) -> Fingerprint:
    """Reads the file once."""
    hasher = Hasher(algorithms)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            hasher.update(block)
    return hasher.fingerprint()


class _Crc32:
    """zlib's CRC-32 as hashlib has its algorithms."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def find_damage(
    directory: Path, expected: Mapping[str, Fingerprint], names: Iterable[str] | None = None
) -> str | None:
    """One line about the first of the named files (None: all) that is missing or not what was
    written; None where all are."""
    for name in expected if names is None else names:
        wanted = expected[name]
        try:
            found = fingerprint(directory / name, wanted.checksums)
        except FileNotFoundError:
            return f"{directory / name}: missing, {wanted.size} bytes expected"
        except OSError as error:
            return f"{directory / name}: cannot be read ({error.strerror})"
        if found.size != wanted.size:
            return f"{directory / name}: {found.size} bytes, {wanted.size} bytes expected"
        if found != wanted:
            kind = next(
                kind for kind in found.checksums if found.checksums[kind] != wanted.checksums[kind]
            )
            present, written = found.checksums[kind], wanted.checksums[kind]
            return f"{directory / name}: damaged, its checksum is {present}, {written} was written"
    return None


def write_manifest(
    path: Path, content: Mapping[str, Any], files: Mapping[str, Fingerprint]
) -> dict[str, Any]:
    """Writes a manifest and returns it, without its seal: `content`, and the files that it vouches
    for."""
    entries = {name: as_entry(found) for name, found in sorted(files.items())}
    manifest = {**content, "files": entries}
    write_sealed(path, manifest)
    return manifest


def as_entry(found: Fingerprint) -> dict[str, Any]:
    """A file's fingerprint as documents hold it."""
    return {"bytes": found.size, **found.checksums}


def of_entry(entry: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint that a document holds. Raises KeyError where it has no checksum."""
    checksums = {name: str(entry[name]) for name in ALGORITHMS if name in entry}
    if not checksums:
        raise KeyError("xxh3")
    return Fingerprint(int(entry["bytes"]), checksums)


def read_fingerprints(manifest: Mapping[str, Any], path: Path) -> dict[str, Fingerprint]:
    """{file: what it must look like} of the manifest read from `path`. Raises
    DamagedCheckpointError where it lists none."""
    try:
        return {str(name): of_entry(entry) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpointError(
            f'{path}: has no "files": {{name: {{"bytes": ..., "xxh3": ...}}}}; an older version of '
            "rlflow wrote it."
        ) from None


def error_reason(error: BaseException) -> str:
    """The system's error where there is one behind it: of a full disk torch says 'unexpected pos
    704 vs 598'."""
    chain = [error]
    while (
        behind := chain[-1].__cause__ or chain[-1].__context__
    ) is not None and behind not in chain:
        chain.append(behind)
    cause = next((behind for behind in chain if isinstance(behind, OSError)), error)
    return (
        f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), 'no reason given')}"
    )


def write_sealed(path: Path, document: Mapping[str, Any], *, private: bool = False) -> None:
    """Writes a JSON document with a checksum of itself, whole or not at all; `read_sealed` checks
    it. private: see `write_text`."""
    # The checksum is of what will be read, not of what has no place in JSON
    content = plain(document)
    write_json(path, {**content, SEAL: _checksum(content)}, private=private)


def read_sealed(path: Path) -> dict[str, Any]:
    """A document that was written sealed, without its seal.

    Raises DamagedCheckpointError where the file is missing, or not what was written.
    """
    if not path.parent.is_dir():
        raise DamagedCheckpointError(f"{path.parent}: no such checkpoint.")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path}: missing, the checkpoint is incomplete.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: damaged ({error}).") from None
    if not isinstance(document, dict) or document.get(SEAL) is None:
        raise DamagedCheckpointError(
            f"{path}: carries no checksum; it is damaged, or an older version of rlflow wrote it."
        )
    if not is_sealed(document):
        raise DamagedCheckpointError(
            f"{path}: damaged, its content does not agree with its checksum."
        )
    return {key: value for key, value in document.items() if key != SEAL}


def is_sealed(document: Mapping[str, Any]) -> bool:
    """Whether a document's checksum is that of its other values."""
    return document.get(SEAL) == _checksum(
        {key: value for key, value in document.items() if key != SEAL}
    )


def _checksum(document: Mapping[str, Any]) -> str:
    """Of the values, however the text is laid out."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
