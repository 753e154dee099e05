"""A directory that appears complete or not at all, with a manifest of its files."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlflow.models.huggingface import why_no_room, why_occupied
from rlflow.storage.files import replacing_directory
from rlflow.storage.integrity import (
    ACCIDENTS,
    EXPORT_MANIFEST,
    FORGERIES,
    Fingerprint,
    fingerprint,
    write_manifest,
)

from ..options import Options
from ..problems import disk_full, output_exists
from ..stream import Copier
from .files import OutputFile, reads_back_differently, write_files


def check_output(
    out: Path, overwrite: bool, reference: Path | None = None, checkpoint: Path | None = None
) -> None:
    """Raises ConversionError (9) unless `out` may be written: absent, empty, or a directory of
    weights that may be replaced, and neither inside the checkpoint nor around it or the
    reference."""
    if checkpoint is not None and checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        raise output_exists(f"{out}: lies in the checkpoint; choose another directory.")
    reason = why_occupied(out, overwrite, reference=reference, checkpoint=checkpoint)
    if reason is not None:
        raise output_exists(reason)


def write_directory(
    out: Path,
    files: Sequence[OutputFile],
    options: Options,
    copier: Copier,
    complete: Callable[[Path], None],
    unchanged: Callable[[], None],
    record: dict[str, Any],
) -> dict[str, Any]:
    """Writes a directory and returns its manifest: `record`, and size and checksums of every file.

    complete: adds the other files to the partial directory. unchanged: raises where what was read
    has changed since. On failure `out` is as it was. Raises ConversionError."""
    keep, check = not options.overwrite, options.verify != "none"
    with _explained(out), replacing_directory(out, keep_existing=keep) as partial:
        check_output(out, options.overwrite)  # it may have been put back just now
        needed = sum(target.nbytes for file in files for target in file.targets)
        problem = why_no_room(out, needed)
        if problem is not None:
            raise disk_full(problem)
        with copier:
            written = write_files(partial, files, copier, options.workers, check)
        complete(partial)
        found = _fingerprints(partial, written, options)
        record = {**record, "verified": options.verify}
        manifest = write_manifest(partial / EXPORT_MANIFEST, record, found)
        unchanged()
        check_output(out, options.overwrite)  # somebody may have made it meanwhile
    return manifest


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turns what the operating system refuses into one line; reading the source has its own
    errors."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or out}: {(error.strerror or str(error)).lower()}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        text = "the disk is full" if full else "cannot be written"
        raise disk_full(f"{out}: {text} ({what}); make room or choose another place.") from error


def _fingerprints(
    directory: Path, written: dict[str, Fingerprint], options: Options
) -> dict[str, Fingerprint]:
    """{file: what it looks like} of a directory. written: of the files with weights, which
    verify=full reads again, for a second checksum. Raises ConversionError (4) where one has other
    bytes."""
    full = options.verify == "full"

    def look(name: str) -> Fingerprint:
        if name in written and not full:
            return written[name]
        found = fingerprint(directory / name, FORGERIES if full else ACCIDENTS)
        if name in written and found.checksums["xxh3"] != written[name].checksums["xxh3"]:
            raise reads_back_differently(directory / name)
        return found

    files = (file for file in directory.rglob("*") if file.is_file())
    names = sorted(file.relative_to(directory).as_posix() for file in files)
    with ThreadPoolExecutor(options.workers) as pool:
        return dict(zip(names, pool.map(look, names)))
