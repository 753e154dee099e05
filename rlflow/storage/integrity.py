"""Whether files are what was written: JSON documents that carry a checksum of their own, and manifests, which are such
documents that list other files.

{..., "files": {name: {"bytes": 704, "crc32": "0f3a5b7c", "sha256": "..."}}, "crc32": "9b0c2d4e"}    sha256: where asked for
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.errors import DamagedCheckpointError
from rlflow.storage.files import plain, write_json

TRAINER_MANIFEST = "trainer.json"
"""Of a trainer's checkpoint; written last."""
EXPORT_MANIFEST = "manifest.json"
"""Of a directory that an export or a conversion wrote: what it was made of, and its files; written last."""
SEAL = "crc32"
BLOCK_BYTES = 2**22


class Fingerprint(NamedTuple):
    """What a file must look like. CRC-32 finds accidents (a flipped bit, a lost block), sha256 forgeries too."""

    size: int  # bytes
    crc32: str  # eight hexadecimal digits
    sha256: str | None = None  # None: not taken


def fingerprint(path: Path, *, sha256: bool = False) -> Fingerprint:
    """Reads the file once."""
    size = checksum = 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            if sha256:
                digest.update(block)
            size += len(block)
    return Fingerprint(size, f"{checksum:08x}", digest.hexdigest() if sha256 else None)


def find_damage(directory: Path, expected: Mapping[str, Fingerprint], names: Iterable[str] | None = None) -> str | None:
    """One line about the first of the named files (None: all) that is missing or not what was written; None where all are."""
    for name in expected if names is None else names:
        wanted = expected[name]
        try:
            found = fingerprint(directory / name, sha256=wanted.sha256 is not None)
        except FileNotFoundError:
            return f"{directory / name}: missing, {wanted.size} bytes expected"
        except OSError as error:
            return f"{directory / name}: cannot be read ({error.strerror})"
        if found.size != wanted.size:
            return f"{directory / name}: {found.size} bytes, {wanted.size} bytes expected"
        if found != wanted:
            differing = zip(found[1:], wanted[1:])
            present, written = next((first, second) for first, second in differing if first != second)
            return f"{directory / name}: damaged, its checksum is {present}, {written} was written"
    return None


def write_manifest(path: Path, content: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> dict[str, Any]:
    """Writes a manifest and returns it, without its seal: `content`, and the files that it vouches for."""
    entries = {
        name: {"bytes": size, "crc32": crc32, **({"sha256": sha256} if sha256 else {})}
        for name, (size, crc32, sha256) in sorted(files.items())
    }
    manifest = {**content, "files": entries}
    write_sealed(path, manifest)
    return manifest


def read_fingerprints(manifest: Mapping[str, Any], path: Path) -> dict[str, Fingerprint]:
    """{file: what it must look like} of the manifest read from `path`. Raises DamagedCheckpointError where it lists none."""
    try:
        return {
            str(name): Fingerprint(int(entry["bytes"]), str(entry["crc32"]), entry.get("sha256"))
            for name, entry in manifest["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpointError(
            f'{path}: has no "files": {{name: {{"bytes": ..., "crc32": ...}}}}; an older version of rlflow wrote it.'
        ) from None


def error_reason(error: BaseException) -> str:
    """The system's error where there is one behind it: of a full disk torch says 'unexpected pos 704 vs 598'."""
    chain = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) is not None and behind not in chain:
        chain.append(behind)
    cause = next((behind for behind in chain if isinstance(behind, OSError)), error)
    return f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), 'no reason given')}"


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON document with a checksum of itself, whole or not at all; `read_sealed` checks it."""
    content = plain(document)  # the checksum is of what will be read, not of what has no place in JSON
    write_json(path, {**content, SEAL: _checksum(content)})


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
    found = document.pop(SEAL, None) if isinstance(document, dict) else None
    if found is None:
        raise DamagedCheckpointError(
            f"{path}: carries no checksum; it is damaged, or an older version of rlflow wrote it."
        )
    if found != _checksum(document):
        raise DamagedCheckpointError(f"{path}: damaged, its content does not agree with its checksum.")
    return document


def _checksum(document: Mapping[str, Any]) -> str:
    """Of the values, however the text is laid out."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
