"""Checks that an index folder, and the corpus it was built from, are what the build wrote.

  rlflow search check indices/wiki          # sizes and samples
  rlflow search check indices/wiki --deep   # every byte

Prints what was checked and ends with 0, else with an error that names the file that differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlflow.errors import DataError
from rlflow_environments.common.commands import add_option
from rlflow_environments.retrieval.indices.folder import check_folder, read_meta
from rlflow_environments.retrieval.records import file_digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which index, and how thoroughly."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="an index folder")
    add_option(parser, "--deep", "read every byte of index and corpus")


def run(args: argparse.Namespace) -> int:
    """Checks and prints. Raises DataError for an index, or a corpus at the place it was built from,
    that is not what the build saw."""
    folder = args.folder.expanduser()
    meta = read_meta(folder)
    check_folder(folder, meta, deep=args.deep)
    corpus = Path(meta.corpus["path"])
    checked = [f"{len(meta.files or {})} files of {folder}"]
    if corpus.is_file():
        key = "sha256" if args.deep else "bytes"
        if (file_digest(corpus) if args.deep else corpus.stat().st_size) != meta.corpus[key]:
            raise DataError(
                f"{corpus}: is not the corpus that {folder} was built on ({key} differs). Build "
                "the index again."
            )
        checked.append(str(corpus))
    how = "every byte" if args.deep else "by samples; --deep reads every byte"
    print(f"as built ({how}): {', '.join(checked)}")
    return 0
