"""Writes a folder of example documents: the articles of a fictional encyclopedia as .md, .html and
.txt, to try the page docs/own_documents.md with a policy that is too small for real prose."""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow_environments.search.world.world import make_world

FORMS = {
    ".md": "# {title}\n\n{text}\n",
    ".html": "<html><head><title>{title}</title></head>"
    "<body><h1>{title}</h1><p>{text}</p></body></html>\n",
    ".txt": "{title}\n\n{text}\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--size", type=float, default=0.5, help="1.0: 2,420 articles")
    args = parser.parse_args()
    try:
        world = make_world(
            args.seed,
            train_questions=1,
            val_questions=1,
            val_share=0.35,
            prompt_template="short",
            size=args.size,
        )
    except ConfigError as problem:
        parser.error(str(problem))
    args.folder.mkdir(parents=True, exist_ok=True)
    for number, passage in enumerate(world["corpus"]):
        suffix = list(FORMS)[number % len(FORMS)]
        escape = html.escape if suffix == ".html" else str
        text = FORMS[suffix].format(title=escape(passage.title), text=escape(passage.body))
        (args.folder / f"{passage.title.replace(' ', '_').lower()}{suffix}").write_text(
            text, encoding="utf-8"
        )
    print(f"wrote {len(world['corpus'])} documents to {args.folder}")


if __name__ == "__main__":
    main()
