"""Downloads the field's public corpora, indices, questions and the encoder from the HuggingFace
hub, checks and unpacks them.

Stopped in the middle, the same command goes on; what is there and whole is not fetched again.
HF_ENDPOINT names a mirror, HF_TOKEN an account for repositories that need one.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:
    sys.path.append(str(ROOT))  # called by its path, as the field's scripts are

from recipes.searchr1.releases import RELEASES, download, select  # noqa: E402
from rlflow.errors import RLFlowError  # noqa: E402

DEFAULT, ITS_FILES = "asearcher-wiki", ("wiki_corpus.jsonl", "wiki_webpages.jsonl")
"""What RLinf's script of this name fetches, which takes no release."""

EXAMPLES = """releases:
{releases}

examples:
  # as RLinf's script: ASearcher's passages and pages, 50 GB
  python recipes/searchr1/download.py --save_path data/wiki2018
  # what Search-R1's server needs
  python -m recipes.searchr1.download wiki-18 wiki-18-e5 --save_path data/wiki-18
  # as Search-R1's script
  python -m recipes.searchr1.download --repo_id PeterJinGo/wiki-18-e5-index --save_path data/wiki-18
  # some files alone
  python -m recipes.searchr1.download flashrag --file 'musique/*' --save_path data/sets
"""


def main() -> int:
    listed = "\n".join(
        f"  {name:16} {release.about} ({release.repo})" for name, release in RELEASES.items()
    )
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES.format(releases=listed), formatter_class=formatter
    )
    about = "names below, or OWNER/NAME of any data set (default: asearcher-wiki without its links)"
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=about)
    parser.add_argument(
        "--repo_id", metavar="OWNER/NAME", help="one more repository, as in Search-R1's script"
    )
    parser.add_argument(
        "--save_path", required=True, type=Path, metavar="DIR", help="where the files go"
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only files like this; nothing is joined",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default main)")
    parser.add_argument(
        "--keep_parts", action="store_true", help="keep the parts of an index once they are joined"
    )
    args = parser.parse_args()
    _in_an_environment()
    names = [*args.releases, *([args.repo_id] if args.repo_id else [])]
    if not names:
        names, args.file = [DEFAULT], args.file or list(ITS_FILES)
    try:
        for name, release in select(names).items():
            print(f"{name}: {release.repo}, {args.revision}")
            ready = download(name, release, args.save_path, files=args.file,
                             revision=args.revision, say=print, keep_parts=args.keep_parts,
                             endpoint=os.environ.get("HF_ENDPOINT"))  # fmt: skip
            print("\n".join(f"ready: {path}" for path in ready))
    except RLFlowError as problem:
        print(f"download.py: {type(problem).__name__}: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


def _in_an_environment() -> None:
    """Goes on in the environment of the scripts, which is made if need be, where this Python has no
    huggingface_hub."""
    if find_spec("huggingface_hub") is not None or "RLFLOW_DOWNLOADS" in os.environ:
        return
    script = (
        '. "$0/recipes/common.sh"; rlflow_setup run; '
        'exec "$RLFLOW_PYTHON" "$0/recipes/searchr1/download.py" "$@"'
    )
    command = ["bash", "-c", script, str(ROOT), *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, "RLFLOW_DOWNLOADS": "1"})


if __name__ == "__main__":
    sys.exit(main())
