"""Manifests: what they vouch for, and that no change of theirs or of a file goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from pathlib import Path

import pytest
import xxhash

from rlflow.errors import DamagedCheckpointError
from rlflow.storage.integrity import (
    FORGERIES,
    Fingerprint,
    error_reason,
    find_damage,
    fingerprint,
    read_fingerprints,
    read_sealed,
    write_manifest,
    write_sealed,
)

CONTENT = bytes(range(256)) * 20_000  # more than one block


def test_a_fingerprint_is_what_the_libraries_say_of_the_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    expected = {
        "xxh3": xxhash.xxh3_128_hexdigest(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "crc32": f"{zlib.crc32(CONTENT):08x}",
    }
    for names in (("xxh3",), ("xxh3", "sha256"), ("crc32",)):
        checksums = {name: expected[name] for name in names}
        assert fingerprint(file, names) == Fingerprint(len(CONTENT), checksums)


@pytest.mark.parametrize("algorithms", [("xxh3",), ("xxh3", "sha256"), ("crc32",)])
def test_a_manifest_comes_back_and_finds_each_kind_of_damage(
    tmp_path: Path, algorithms: tuple[str, ...]
) -> None:
    """crc32: as earlier versions wrote them."""
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "b").write_bytes(b"second")
    files = {name: fingerprint(tmp_path / name, algorithms) for name in ("b", "a")}
    written = write_manifest(tmp_path / "manifest.json", {"step": 3}, files)
    read = read_sealed(tmp_path / "manifest.json")
    assert read == written and read["step"] == 3 and read_fingerprints(read, tmp_path) == files
    assert find_damage(tmp_path, files) is None
    for content, word in (
        (b"secont", "damaged, its checksum"),
        (b"sec", "3 bytes, 6 bytes expected"),
        (None, "missing"),
    ):
        (tmp_path / "b").write_bytes(content) if content else (tmp_path / "b").unlink()
        assert word in (find_damage(tmp_path, files) or "")
        assert find_damage(tmp_path, files, ["a"]) is None


def test_a_forged_xxh3_does_not_pass_where_sha256_was_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"first")
    found = fingerprint(tmp_path / "a", FORGERIES)
    forged = Fingerprint(found.size, {**found.checksums, "sha256": "0" * 64})
    damage = find_damage(tmp_path, {"a": forged}) or ""
    assert "damaged, its checksum is" in damage and damage.endswith(f"{'0' * 64} was written")


def test_every_changed_character_of_a_sealed_document_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_sealed(path, {"step": 7, "seconds": math.inf, "names": ("x", "y")})
    assert read_sealed(path) == {"step": 7, "seconds": None, "names": ["x", "y"]}
    text = path.read_text()
    for place in (place for place, character in enumerate(text) if not character.isspace()):
        path.write_text(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
        with pytest.raises(DamagedCheckpointError):
            read_sealed(path)


def test_documents_without_a_seal_or_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps({"step": 1}))
    with pytest.raises(DamagedCheckpointError, match="carries no checksum"):
        read_sealed(path)
    with pytest.raises(DamagedCheckpointError, match=r"trainer.json: has no .files.*older version"):
        read_fingerprints({"files": {"a": 5}}, path)
    with pytest.raises(DamagedCheckpointError, match="no such checkpoint"):
        read_sealed(tmp_path / "nowhere" / "trainer.json")


def test_the_reason_of_a_failure_is_the_systems_error_behind_it() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error
    except RuntimeError as error:
        assert error_reason(error) == "OSError: [Errno 28] No space left on device"
    assert error_reason(ValueError("two\nlines")) == "ValueError: two"
