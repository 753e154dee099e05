"""Claims about the advice: sizes of the field's index by arithmetic, a choice that fits and is fast enough."""

from __future__ import annotations

import dataclasses

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.building.advising import Machine, advise, candidates, disturbance
from rlflow_environments.retrieval.commands.advise import count_passages, parse_size
from rlflow_environments.retrieval.indices.cost import building_bytes, parse_kind, serving_bytes, stored_bytes
from rlflow_environments.search.__main__ import main

WIKI, DIMENSIONS = 21_015_324, 768


def machine(ram, vram=0.0):
    return Machine(ram * 1e9, vram * 1e9, cpu_bandwidth=300e9, cpu_arithmetic=2e12)


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    # 21,015,324 x 768: 64.56 GB in float32, a half and a quarter of it; IVF adds 8 bytes per id and its centroids;
    # HNSW32 adds 64 + 8 links of 4 bytes.
    [
        ("Flat", 64.56),
        ("torch", 64.56),
        ("SQfp16", 32.28),
        ("SQ8", 16.14),
        ("IVF4096,SQ8", 16.14 + 0.168 + 0.013),
        ("HNSW32", 70.6),
    ],
)
def test_sizes_of_wikipedia_2018(kind, gigabytes):
    assert serving_bytes(parse_kind(kind, DIMENSIONS), WIKI, DIMENSIONS) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_lists_of_float32_are_served_with_a_copy_in_eight_bits_that_is_not_stored():
    parsed = parse_kind("IVF1024,Flat", 384)
    stored = 200_000 * (4 * 384 + 8) + 1024 * 384 * 4
    assert stored_bytes(parsed, 200_000, 384) == stored
    assert serving_bytes(parsed, 200_000, 384) == stored + 200_000 * (384 + 16)
    assert serving_bytes(parsed, WIKI, 384) == stored_bytes(parsed, WIKI, 384)  # the copy would be too large


def test_streamed_kinds_are_built_in_memory_that_does_not_depend_on_the_corpus():
    for kind in ("Flat", "torch"):
        parsed = parse_kind(kind, DIMENSIONS)
        assert (
            building_bytes(parsed, WIKI, DIMENSIONS, block=2048)
            == building_bytes(parsed, 10**9, DIMENSIONS, block=2048)
            < 1e9
        )


@pytest.mark.parametrize(
    ("ram", "vram", "qps", "label"),
    [
        (128, 0, 20, "torch, float32"),  # 4.6/s alone, 62/s in batches: exact and enough
        (128, 80, 500, "torch on GPU, float32"),  # on the CPU it would be exact and too slow
        (128, 48, 500, "torch on GPU, float16 scan"),
        (40, 0, 20, "torch, bfloat16 scan"),
        (24, 0, 20, "IVF4096,SQ8"),  # SQ8 fits too and is too slow
        (24, 0, 5, "SQ8"),
        (24, 0, 10**6, "IVF4096,SQ8"),  # nothing reaches it: the fastest that fits
    ],
)
def test_the_choice_fits_and_is_fast_enough(ram, vram, qps, label):
    found = candidates(WIKI, DIMENSIONS, machine(ram, vram))
    assert advise(found, qps).label == label


def test_nothing_fits_in_too_little_memory():
    assert advise(candidates(WIKI, DIMENSIONS, machine(8)), 1) is None
    assert main(["advise", "--corpus", str(WIKI), "--ram", "8GB"]) == 1


def test_the_command_prints_a_table_and_what_to_run(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "a", "text": "b"}\n\n' * 7)
    assert main(["advise", "--corpus", str(corpus), "--dim", "64", "--bandwidth", "10GB"]) == 0
    shown = capsys.readouterr().out
    assert "7 passages x 64 dimensions" in shown and "take torch, " in shown and "path: index}" in shown


def test_numbers_and_sizes_are_read_as_people_write_them():
    assert [count_passages(text) for text in ("21015324", "21M", "1e6", "2_500", "1.5k")] == [
        21015324,
        21 * 10**6,
        10**6,
        2500,
        1500,
    ]
    assert [parse_size(text, "--ram") for text in ("64GB", "64", "1.5 TB", "2GiB", "300GB/s")] == [
        64e9,
        64e9,
        1.5e12,
        2**31,
        300e9,
    ]
    for read in (count_passages, lambda text: parse_size(text, "--ram")):
        with pytest.raises(ConfigError, match="expected a"):
            read("much")
    with pytest.raises(ConfigError, match="cost of 'LSH' is not known"):
        parse_kind("LSH", 8)


def test_a_machine_that_was_busy_is_not_advised_on_without_a_word(capsys, monkeypatch):
    quiet = machine(64)
    assert disturbance(quiet, load=0.9, cores=2) == ""
    assert "3.1 processes want its 2 cores" in disturbance(quiet, load=3.1, cores=2)
    assert "up to 4.0 times as long" in disturbance(dataclasses.replace(quiet, spread=4.0), load=0.0, cores=2)
    assert "1.8 GB/s is less" in disturbance(dataclasses.replace(quiet, cpu_bandwidth=1.8e9), load=0.0, cores=2)
    slow = dataclasses.replace(quiet, cpu_bandwidth=1.8e9)
    monkeypatch.setattr("rlflow_environments.retrieval.building.advising.measure_machine", lambda ram, vram: slow)
    assert main(["advise", "--corpus", "1M", "--ram", "64GB"]) == 0
    assert "WARNING: this machine was busy while it was measured" in capsys.readouterr().out
    assert main(["advise", "--corpus", "1M", "--ram", "64GB", "--bandwidth", "20GB"]) == 0
    assert "WARNING" not in capsys.readouterr().out
