"""Makes questions and answers from a folder of your own documents, to train and evaluate a search
agent on.

It reads .txt, .md, .html and .jsonl (rows of a corpus) and writes corpus.jsonl, pages.jsonl,
train.jsonl, val.jsonl and report.json. Without an endpoint, rules for English prose compose the
questions; with one, any model with the OpenAI interface does, and what it answered is kept in
answers.jsonl, so that a run that was stopped resumes and pays for nothing twice.

Questions whose answer stands in the question, is not in the passage, is not found by retrieval, or
is ambiguous are left out, and so are leaks between training and validation, which come from
different documents. The counts are printed and written.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow_environments.common.commands import add_option

if TYPE_CHECKING:
    from rlflow_environments.common.progress import ProgressLine
    from rlflow_environments.search.own_documents.making import Compose, QuestionRequest

EXAMPLES = """examples:
  rlflow search qa my_documents data/mine
  rlflow search qa my_documents data/mine --train 500 --val 100 --multi-hop 0.3 --seed 1
  rlflow search qa my_documents data/mine --endpoint http://localhost:8001/v1 \\
      --model Qwen2.5-7B-Instruct
  OPENAI_API_KEY=... rlflow search qa my_documents data/mine --endpoint https://HOST/v1 --model NAME
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Documents, output, how many of what, and the model."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "documents", metavar="DOCS", help="a folder, read with its subfolders, or one file"
    )
    parser.add_argument("out", metavar="OUT", help="the folder that is written to")
    add = partial(add_option, parser)
    add("--train N", "training questions at the most", 2000)
    add("--val N", "validation questions at the most", 200)
    add("--val-share X", "of the documents, kept for validation", 0.2)
    add("--multi-hop X", "share of two-hop questions", 0.5)
    add("--no-blanks", "only questions about relations, no blanks in sentences")
    add("--seed N", "of the split and the choice", 0)
    add("--max-characters N", "of a passage's text", 1000)
    add("--retriever NAME", "that must find the answers: bm25, dense, ...", "bm25")
    add("--top-k N", "passages it may show", 3)
    add("--skip-bad", "leave out documents that cannot be read")
    add = partial(add_option, parser.add_argument_group("a model that writes the questions"))
    add("--endpoint URL", "of an OpenAI-compatible server, up to and with /v1")
    add("--model NAME", "the model's name there")
    add("--api-key-variable NAME", "environment variable with the key", "OPENAI_API_KEY")
    add("--concurrency N", "requests in flight", 8)
    add("--timeout-s S", "of one attempt", 120.0)
    add("--tries N", "attempts at a request", 5)


def run(args: argparse.Namespace) -> int:
    """Reads, composes, screens, writes and prints the account; returns 0."""
    from rlflow.errors import ConfigError
    from rlflow_environments.common.progress import ProgressLine
    from rlflow_environments.search.own_documents.documents import read_documents
    from rlflow_environments.search.own_documents.making import QuestionRequest, make_questions

    given = {field.name: getattr(args, field.name, None) for field in fields(QuestionRequest)}
    request = QuestionRequest(**{**given, "blanks": not args.no_blanks})
    folder, out = (Path(path).expanduser().resolve() for path in (args.documents, args.out))
    if out.is_relative_to(folder):
        raise ConfigError(
            f"OUT: {args.out} lies in {args.documents} and would be read the next time. Give "
            "another folder."
        )
    documents, others = read_documents(args.documents, skip_bad=args.skip_bad)
    if others:
        left = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
        print(f"left alone, no documents: {left}", file=sys.stderr)
    progress = ProgressLine(sys.stderr)
    report = make_questions(
        documents, args.out, request, progress, _model(args, request, progress), others
    )
    print("\n".join(report.lines()))
    print(f"wrote corpus.jsonl, pages.jsonl, train.jsonl, val.jsonl and report.json to {args.out}")
    return 0


def _model(
    args: argparse.Namespace, request: QuestionRequest, progress: ProgressLine
) -> Compose | None:
    """What composes the questions with a model; None for the rules."""
    from rlflow.errors import ConfigError
    from rlflow_environments.common.chat_endpoint import ChatEndpoint
    from rlflow_environments.search.own_documents.writing import ask_model

    if args.endpoint is None and args.model is None:
        return None
    if args.endpoint is None or args.model is None:
        missing = "--model NAME" if args.model is None else "--endpoint URL"
        raise ConfigError(
            f"a model that writes the questions needs --endpoint and --model; {missing} is missing."
        )
    endpoint = ChatEndpoint(
        args.endpoint,
        args.model,
        api_key=os.environ.get(args.api_key_variable),
        concurrency=args.concurrency,
        timeout_s=args.timeout_s,
        tries=args.tries,
        cache=Path(args.out).expanduser() / "answers.jsonl",
        name_of=lambda name: "--endpoint" if name == "url" else f"--{name.replace('_', '-')}",
    )
    return ask_model(endpoint, request, progress)
