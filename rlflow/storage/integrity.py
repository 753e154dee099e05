"""Whether files are what was written: sizes and checksums, and JSON documents that carry their own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.errors import DamagedCheckpointError

MANIFEST = "trainer.json"
"""The sealed document in which a trainer's checkpoint lists its other files; written last."""
SEAL = "crc32"
BLOCK_BYTES = 2**22


class Fingerprint(NamedTuple):
    """What a file must look like. The checksum finds accidents (a flipped bit, a lost block), not forgeries."""

    size: int  # bytes
    crc32: str  # eight hexadecimal digits


def fingerprint(path: Path) -> Fingerprint:
    """Reads the file once."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return Fingerprint(size, f"{checksum:08x}")


def find_damage(directory: Path, expected: Mapping[str, Fingerprint], names: Iterable[str] | None = None) -> str | None:
    """One line about the first of the named files (None: all) that is missing or not what was written; None where all are."""
    for name in expected if names is None else names:
        try:
            found = fingerprint(directory / name)
        except FileNotFoundError:
            return f"{directory / name}: missing, {expected[name].size} bytes expected"
        except OSError as error:
            return f"{directory / name}: cannot be read ({error.strerror})"
        if found.size != expected[name].size:
            return f"{directory / name}: {found.size} bytes, {expected[name].size} bytes expected"
        if found != expected[name]:
            return f"{directory / name}: damaged, its checksum is {found.crc32}, {expected[name].crc32} was written"
    return None


def table(files: Mapping[str, Fingerprint]) -> dict[str, dict[str, Any]]:
    """The entries of a manifest that describe files; `listed` reads them."""
    return {
        "files": {name: files[name].size for name in sorted(files)},
        "checksums": {name: files[name].crc32 for name in sorted(files)},
    }


def listed(manifest: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """The files that a manifest describes, by name."""
    return {name: Fingerprint(size, manifest["checksums"][name]) for name, size in manifest["files"].items()}


def reason(error: BaseException) -> str:
    """The system's error where there is one behind it: of a full disk torch says 'unexpected pos 704 vs 598'."""
    chain = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) is not None and behind not in chain:
        chain.append(behind)
    told = next((one for one in chain if isinstance(one, OSError)), error)
    return f"{type(told).__name__}: {next(iter(str(told).strip().splitlines()), 'no reason given')}"


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document with a checksum of itself; `read_sealed` checks it."""
    return {**document, SEAL: _checksum(document)}


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
    except (OSError, ValueError) as error:
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
