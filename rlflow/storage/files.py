"""Files and directories that are written whole or not at all: aside, brought to disk, renamed.

<name>.<process>.<number>.partial    being written by `replacing`, or removed; a kill leaves it
behind, read by nobody;
                                     a directory is locked by its process while that lives
<name>.<process>.<number>.replaced   a directory that is being exchanged for a new one
<name>.partial                       being written by a caller that continues it after a kill

The number is random, so that none of these names is that of a directory which somebody else made,
or another container, whose processes have the same numbers: nothing under a name of the user's
choice is removed, and no symbolic link is followed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlflow.errors import CheckpointError
from rlflow.storage.memory_folders import lock

PARTIAL = ".partial"
REPLACED = ".replaced"
_OF_A_PROCESS = re.compile(rf"\.\d+\.\d+({re.escape(PARTIAL)}|{re.escape(REPLACED)})$")


@contextmanager
def replacing(path: str | Path, *, durable: bool = True) -> Iterator[Path]:
    """Gives a path of its own beside `path` to write a file to; it takes the place of `path` when
    the block ends well.

    A kill or an error leaves the old file or none, never half of one. durable: the new one also
    survives a power cut; leave it out only for what can be made again, since it costs milliseconds.
    Folders are made. Raises OSError."""
    with _aside(Path(path)) as aside:
        yield aside
        replace_file(aside, path, durable=durable)


@contextmanager
def replacing_directory(path: str | Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Gives an empty directory beside `path` to fill; it takes the place of `path` when the block
    ends well.

    keep_existing: for contents that are the same whoever makes them; another process's directory
    stays and this one goes. What killed processes left of theirs goes first. Raises OSError."""
    path = Path(path).absolute()  # "." has no name
    restore_replaced(path)
    _clear_killed(path)
    with _aside(path) as aside, holding(aside, make=True):
        yield aside
        try:
            replace_directory(aside, path, keep_existing=keep_existing)
        except OSError:
            if not (keep_existing and path.is_dir()):
                raise


def write_text(path: str | Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Writes UTF-8 text with `replacing`, line ends as they are. A lone surrogate (half of a cut
    emoji, in text from outside) is written as JSON escapes it. private: only this user can read it,
    whatever else may have been missed in it."""
    with replacing(path, durable=durable) as aside:
        aside.touch(0o600 if private else 0o666)
        aside.write_bytes(text.encode(errors="backslashreplace"))


def write_json(path: str | Path, value: Any, *, private: bool = False) -> None:
    """Writes one JSON document with `replacing`. Numbers that are not finite become null. private:
    see `write_text`."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n", private=private)


def write_json_lines(path: str | Path, values: Iterable[Any]) -> None:
    """Writes one line of JSON per value with `replacing`. Numbers that are not finite become
    null."""
    lines = (json.dumps(plain(value), ensure_ascii=False) + "\n" for value in values)
    write_text(path, "".join(lines))


def partial_path(path: str | Path) -> Path:
    """Where a file or directory is until it is complete, if whoever writes it continues it after a
    kill."""
    return Path(f"{path}{PARTIAL}")


def aside_path(path: str | Path) -> Path:
    """Where a file or directory is until it is complete: a name that no other process writes to."""
    return _own_name(Path(path), PARTIAL)


def replace_file(partial: Path, path: str | Path, *, durable: bool = True) -> None:
    """Gives a finished file its name, in place of one that stands there. durable: see
    `replacing`."""
    if durable:
        sync(partial)
    os.replace(partial, path)
    if durable:
        sync(Path(path).absolute().parent)


def replace_directory(partial: Path, path: Path, *, keep_existing: bool = False) -> None:
    """Gives a finished directory its name, in place of one that stands there; all its files reach
    the disk first.

    keep_existing: raises OSError where there is one with something in it. A kill between the two
    renames leaves the old directory as `.replaced`: `restore_replaced` puts it back. Raises
    OSError, and leaves the old one in its place."""
    sync_tree(partial)
    replaced = None
    if os.path.lexists(path) and not keep_existing:
        replaced = _own_name(path, REPLACED)
        os.replace(path, replaced)
    try:
        os.replace(partial, path)
    except OSError:
        if replaced is not None:
            os.replace(replaced, path)
        raise
    sync(path.absolute().parent)
    if replaced is not None:
        with suppress(OSError):  # it stays for `restore_replaced`: the new one is in place
            _remove_renamed(replaced, path)


def restore_replaced(path: Path) -> None:
    """Clears up after a kill within `replace_directory`: `path` is put back where it is missing."""
    for replaced in _of_processes(path.parent, REPLACED, path.name):
        if os.path.lexists(path):
            with suppress(OSError):
                _remove_renamed(replaced, path)
        else:
            os.replace(replaced, path)


def remove_directory(path: Path) -> None:
    """Removes a directory. It is renamed first: a kill in the middle leaves no half of it under a
    good name."""
    _remove_renamed(path, path)


def clear_partials(folder: Path) -> None:
    """Clears what a kill within this module left in a folder where others make directories at most:
    what was being written or removed goes, but for a directory that a living process fills; one
    that was being exchanged is put back where it is missing."""
    for entry in _of_processes(folder, PARTIAL):
        if not is_held(entry):
            _remove(entry)
    for entry in _of_processes(folder, REPLACED):
        restore_replaced(folder / _OF_A_PROCESS.sub("", entry.name))


def sync_tree(directory: Path) -> None:
    """Brings a directory to disk, with all that is in it."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Brings a file's content, or a directory's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Of the file, whoever wrote it: not only of what went through this descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside `path` that no other process or thread writes to; what is under it at the end
    is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_path(path)
    try:
        yield aside
    finally:
        _remove(aside)


@contextmanager
def holding(path: Path, make: bool = False) -> Iterator[None]:
    """A directory, by whose lock others see that somebody fills it, or reads it. make: a new
    one."""
    if make:
        path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _clear_killed(path: Path) -> None:
    """Removes the directories that killed processes were to give the name `path`."""
    for entry in _of_processes(path.parent, PARTIAL, path.name):
        with suppress(OSError):  # gone, or without locks
            if entry.is_dir() and not entry.is_symlink() and not _is_held(entry):
                _remove(entry)


def is_held(entry: Path) -> bool:
    """Whether it is a directory that a living process is `holding`."""
    with suppress(OSError):  # gone, or a file system without locks
        return _is_held(entry)
    return False


def _is_held(entry: Path) -> bool:
    if entry.is_symlink() or not entry.is_dir():
        return False
    descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return not lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def why_unwritable(path: Path) -> str | None:
    """Why nothing can be made at `path`, by the nearest folder there; None where it can be."""
    ground = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    probe = aside_path(ground / "probe")
    with suppress(OSError):  # trying alone says it: by its mode root may write to /proc
        probe.mkdir()
        probe.rmdir()
        return None
    return f"{path} cannot be written, as {ground} does not allow it"


def _own_name(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.randbits(48)}{ending}")


def _of_processes(folder: Path, ending: str, name: str = "") -> list[Path]:
    """What lies in a folder under names of `_own_name`; of the path of this name alone."""
    if not folder.is_dir():
        return []
    return [
        entry
        for entry in folder.iterdir()
        if entry.name.endswith(ending)
        and _OF_A_PROCESS.search(entry.name)
        and name in ("", _OF_A_PROCESS.sub("", entry.name))
    ]


def _remove_renamed(directory: Path, path: Path) -> None:
    """Removes a directory under a name that no reader takes for `path`."""
    doomed = _own_name(path, PARTIAL)
    os.replace(directory, doomed)
    _remove(doomed, ignore_errors=False)


def _remove(path: Path, ignore_errors: bool = True) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def read_json(path: str | Path) -> Any:
    """One JSON document.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; the run or checkpoint is incomplete."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged, not JSON: {error}.") from None


def read_json_lines(path: str | Path, *, unfinished: bool = False) -> list[Any]:
    """The values of a file with one JSON document per line. unfinished: a last line without its
    end is one that a kill cut short, and is left out.

    Raises:
        CheckpointError: it cannot be read, or a line is damaged (file, line number).
    """
    try:
        *lines, last = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); expected lines of JSON."
        ) from None
    values = []
    for number, line in enumerate([*lines, last] if last and not unfinished else lines, start=1):
        try:
            values.append(json.loads(line.decode()))
        except (ValueError, RecursionError):
            raise CheckpointError(
                f"{path}:{number}: expected a line of JSON in UTF-8, found {line[:80]!r}; "
                "remove this line."
            ) from None
    return values


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings and lists; empty ones stand for
    themselves."""
    if isinstance(value, (list, tuple)) and value:
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, entry in value.items():
        yield from leaves(entry, f"{path}.{key}" if path else str(key))


def plain(value: Any) -> Any:
    """The value in what JSON can say: numbers that are not finite become null, other objects their
    text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch numbers and arrays
        return plain(value.tolist())
    return str(value)
