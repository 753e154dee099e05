"""Writing a directory that appears complete or not at all: `<out>.partial`, a lock, a manifest, a rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.files import partial_path, replace_directory, restore_replaced

from .journal import NAME as JOURNAL
from .journal import Journal
from .sink import BLOCK_BYTES, OutputFile, Sink

MANIFEST = "manifest.json"
"""Of an output: where it came from, and size and checksum of every other file."""
VERIFICATIONS = ("fast", "full", "none")


@dataclass(frozen=True)
class Writing:
    """How to write. verify: one of VERIFICATIONS. resume: continue what a killed conversion left, and keep what a
    failure leaves."""

    workers: int = 4
    overwrite: bool = False
    resume: bool = False
    verify: str = "fast"


def check_output(out: Path, source: Path | None, reference: Path, overwrite: bool) -> None:
    """Raises ConversionError (9) unless `out` may be written: absent, or a directory of weights that may be replaced,
    and neither inside the source nor around it or the reference."""
    place = out.resolve()
    if source is not None and (place == source.resolve() or source.resolve() in place.parents):
        raise ConversionError(f"{out}: lies in the checkpoint; choose another directory.", ExitCode.OUTPUT_EXISTS)
    for name, one in (("checkpoint", source), ("reference", reference)):
        if one is not None and (place == one.resolve() or place in one.resolve().parents):
            raise ConversionError(f"{out}: holds the {name}; choose another directory.", ExitCode.OUTPUT_EXISTS)
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConversionError(f"{out}: exists; choose another directory or pass --overwrite.", ExitCode.OUTPUT_EXISTS)
    ours = (out / "config.json").is_file() or (out / MANIFEST).is_file()
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not ours):
        raise ConversionError(
            f"{out}: is not a model directory (no config.json), so --overwrite does not replace it; choose another.",
            ExitCode.OUTPUT_EXISTS,
        )


def write_directory(
    out: Path,
    files: Sequence[OutputFile],
    writing: Writing,
    *,
    key: dict[str, Any],
    fill: Callable[[Sink], None],
    complete: Callable[[Path], None],
    record: dict[str, Any],
) -> dict[str, Any]:
    """Writes a directory and returns its manifest: `record`, and size and checksums of every file.

    fill: writes the blocks of `files` into the sink. complete: adds the other files to the partial directory. key: what
    a resumed conversion must agree in. On failure `out` is as it was. Raises ConversionError."""
    with _partial(out, key, writing.resume) as (partial, journal):
        with Sink(partial, files, journal) as sink:
            fill(sink)
            checksums = sink.finish(writing.workers, writing.verify != "none")
        complete(partial)
        listed = _listed(partial, checksums, writing)
        manifest = {**record, "verified": writing.verify, "files": listed}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        journal.remove()
        replace_directory(partial, out)
    return manifest


@contextlib.contextmanager
def _partial(out: Path, key: dict[str, Any], resume: bool) -> Iterator[tuple[Path, Journal]]:
    """`<out>.partial` with its journal. It stays after an interruption, or with `resume`; any other failure removes it."""
    partial = partial_path(out)
    with _explained(partial):
        partial.mkdir(parents=True, exist_ok=True)
        restore_replaced(out)
    with _explained(partial), contextlib.closing(Journal.open(partial)) as journal:
        if resume:
            journal.resume(key)
        else:
            _empty(partial)
            journal.begin(key)
        try:
            yield partial, journal
        except KeyboardInterrupt:
            raise
        except BaseException:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def _explained(partial: Path) -> Iterator[None]:
    """Turns what the operating system refuses into one line; reading the source has its own errors."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or partial}: {(error.strerror or str(error)).lower()}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        text = "the disk is full" if full else "cannot be written"
        raise ConversionError(
            f"{partial}: {text} ({what}); make room or choose another place.", ExitCode.DISK_FULL
        ) from error


def _empty(directory: Path) -> None:
    for one in directory.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        elif one.name != JOURNAL:
            one.unlink()


def _listed(directory: Path, checksums: dict[str, int], writing: Writing) -> dict[str, dict[str, Any]]:
    """{file: size and checksums} of a directory. With verify=full the files are read for their sha256, in parallel."""
    names = sorted(
        file.relative_to(directory).as_posix()
        for file in directory.rglob("*")
        if file.is_file() and file.name != JOURNAL
    )
    with ThreadPoolExecutor(writing.workers) as pool:
        hashes = (
            pool.map(lambda name: sha256(directory / name), names) if writing.verify == "full" else [None] * len(names)
        )
        found = {}
        for name, digest in zip(names, hashes):
            crc = checksums[name] if name in checksums else crc32(directory / name)
            found[name] = {"bytes": (directory / name).stat().st_size, "crc32": f"{crc:08x}"}
            if digest:
                found[name]["sha256"] = digest
    return found


def crc32(file: Path) -> int:
    """The CRC-32 of a file's content."""
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def sha256(file: Path) -> str:
    """The sha256 of a file's content: 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
