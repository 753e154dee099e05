"""Writing a directory that appears complete or not at all: `<out>.partial`, a lock, a manifest, a rename."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.files import clear_partials, partial_path, replace_directory, restore_replaced
from rlflow.storage.integrity import EXPORT_MANIFEST, Fingerprint, fingerprint, write_manifest

from .journal import NAME as JOURNAL
from .journal import Journal
from .output_files import OutputFile, OutputFiles


@dataclass(frozen=True)
class WriteOptions:
    """How to write. verify: `fast`, `full` or `none`. resume: continue what a killed conversion left, and keep what a
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
    for name, path in (("checkpoint", source), ("reference", reference)):
        if path is not None and (place == path.resolve() or place in path.resolve().parents):
            raise ConversionError(f"{out}: holds the {name}; choose another directory.", ExitCode.OUTPUT_EXISTS)
    check_replaceable(out, overwrite)


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises ConversionError (9) where something stands at `out` that may not be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConversionError(f"{out}: exists; choose another directory or pass --overwrite.", ExitCode.OUTPUT_EXISTS)
    ours = (out / "config.json").is_file() or (out / EXPORT_MANIFEST).is_file()
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not ours):
        raise ConversionError(
            f"{out}: is not a model directory (no config.json), so --overwrite does not replace it; choose another.",
            ExitCode.OUTPUT_EXISTS,
        )


def write_directory(
    out: Path,
    files: Sequence[OutputFile],
    writing: WriteOptions,
    *,
    key: dict[str, Any],
    fill: Callable[[OutputFiles], None],
    complete: Callable[[Path], None],
    unchanged: Callable[[], None],
    record: dict[str, Any],
) -> dict[str, Any]:
    """Writes a directory and returns its manifest: `record`, and size and checksums of every file.

    fill: writes the blocks of `files` into the outputs. complete: adds the other files to the partial directory. unchanged:
    raises where what was read has changed since. key: what a resumed conversion must agree in. On failure `out` is as it
    was. Raises ConversionError."""
    with _partial(out, key, writing) as (partial, journal):
        with OutputFiles(partial, files, journal, writing.verify != "none") as outputs:
            fill(outputs)
            checksums = outputs.finish()
        complete(partial)
        written = _fingerprints(partial, checksums, writing)
        manifest = write_manifest(partial / EXPORT_MANIFEST, {**record, "verified": writing.verify}, written)
        unchanged()
        check_replaceable(out, writing.overwrite)  # somebody may have made it meanwhile
        replace_directory(partial, out, keep_existing=not writing.overwrite)
        with contextlib.suppress(OSError):
            (out / JOURNAL).unlink()  # only now: without it nobody could tell whose the directory is
    return manifest


@contextlib.contextmanager
def _partial(out: Path, key: dict[str, Any], writing: WriteOptions) -> Iterator[tuple[Path, Journal]]:
    """`<out>.partial` with its journal, locked until it has its final name. It stays after an interruption, or with
    `resume`; any other failure removes it."""
    partial, resume = partial_path(out), writing.resume
    with _explained(partial), contextlib.closing(Journal.open(partial)) as journal:
        try:
            restore_replaced(out)
            check_replaceable(out, writing.overwrite)  # another conversion may have ended since the first check
            if resume:
                journal.resume(key)
            else:
                _empty(partial)
                journal.begin(key)
            yield partial, journal
        except KeyboardInterrupt:
            raise
        except BaseException:
            if not resume and journal.is_of(partial):
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
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != JOURNAL:
            entry.unlink()


def _fingerprints(directory: Path, checksums: dict[str, int], writing: WriteOptions) -> dict[str, Fingerprint]:
    """{file: what it looks like} of a directory. checksums: CRC-32 by file of what was written block by block; with
    verify=full these files are read again too. Raises ConversionError (4) where one has other bytes."""
    full = writing.verify == "full"

    def look(name: str) -> Fingerprint:
        file = directory / name
        if name in checksums and not full:
            return Fingerprint(file.stat().st_size, f"{checksums[name]:08x}")
        found = fingerprint(file, sha256=full)
        if name in checksums and int(found.crc32, 16) != checksums[name]:
            raise ConversionError(
                f"{file}: reads back differently than it was written; the disk or the memory is faulty.",
                ExitCode.DAMAGED,
            )
        return found

    clear_partials(directory)  # of a manifest that a killed conversion was writing
    files = (file for file in directory.rglob("*") if file.is_file())
    names = sorted({file.relative_to(directory).as_posix() for file in files} - {JOURNAL, EXPORT_MANIFEST})
    with ThreadPoolExecutor(writing.workers) as pool:
        return dict(zip(names, pool.map(look, names)))
