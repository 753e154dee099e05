"""`rlflow ask`: a question to a policy, which answers it in its environment."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.commands.arguments import (
    Commands,
    add_color,
    add_command,
    add_model_options,
    add_options,
    check_least,
    flag,
    option,
)
from rlflow.commands.paint import Paint
from rlflow.errors import ConfigError

from .conversation import Columns, Conversation

if TYPE_CHECKING:
    from rlflow.rollout import Engine, Rollout

OVERRIDE = re.compile(r"[a-z_]+(\.[\w-]+)+=")


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "ask",
        run,
        "ask a trained policy a question, in its environment",
        """
        Lets a policy answer a question that is typed in: its thoughts, what it asks the environment
        for, what it is shown (collapsed) and its answer, as they are written. Without a question it
        asks for one after another. MODEL is a run (its export or newest checkpoint), a checkpoint,
        or a HuggingFace directory with --env or --config.
        """,
        """
        rlflow ask runs/my-run "Who founded the press of Vasmere?" --before
        rlflow ask runs/my-run
        rlflow ask Qwen2.5-3B-Instruct "Who was it?" --config my.yaml
        """,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("question", nargs="?", metavar="QUESTION")
    flag(
        parser,
        "--before",
        "beside it, on the left, the policy that the run started from",
    )
    start = "beside it this HuggingFace directory, in place of that policy"
    option(parser, "--start", "DIR", start)
    flag(parser, "--full", "show observations whole")
    add_model_options(parser)
    option(parser, "--temperature", "T", "0 is greedy", default=0.0)
    add_color(parser)
    parser.set_defaults(data=None)
    add_options(parser, "eval")


def run(args: argparse.Namespace) -> int:
    """Answers one question, or one after another."""
    from rlflow.commands.eval import evaluation_config
    from rlflow.config.checks import check_config
    from rlflow.run.assemble import make_engine, make_rollout
    from rlflow.run.origin import model_directory, starting_model

    _sort_words(args)
    check_least(args, temperature=0)
    if args.start and Path(args.start).exists():
        args.start = str(Path(args.start).absolute())  # the folder may change to that of a run
    with ExitStack() as stack:
        say = lambda text: print(text, file=sys.stderr)  # noqa: E731
        model = stack.enter_context(model_directory(final_model(args.model), args.hf, say))
        config = evaluation_config(args, model)
        check_config(config)
        rollout = stack.enter_context(make_rollout(config))
        rollout.environment.task_from_text("?")  # says so before anything is asked
        engines = {"after": rollout.engines[0]}
        if args.before or args.start:
            start = args.start or (starting_model(model.config, "--start") if model.config else "")
            check_model_directory(start)
            at_start = replace(config, model=replace(config.model, path=start))
            before = make_engine(at_start, rollout.tokenizer)
            engines = {"before": before, **engines}
            rollout.engines = list(engines.values())  # closed with it
        paint = Paint(args.color)
        for question in [args.question] if args.question else typed(sys.stdin):
            if len(engines) == 1:
                told = Conversation(paint, live=True, whole=args.full)
                answer(rollout, engines["after"], question, args.temperature, told)
                continue
            with Columns(list(engines), paint, whole=args.full) as columns:
                for name, conversation in columns.heard:
                    answer(rollout, engines[name], question, args.temperature, conversation)
    return 0


def final_model(given: str) -> Path:
    """The export of a finished run, which needs no conversion; else what was given."""
    path = Path(given)
    if not (path / "config.yaml").is_file() or not (path / "export" / "config.json").is_file():
        return path
    from rlflow.run.directory import RunDirectory
    from rlflow.storage.files import read_json

    run = RunDirectory.open(path)
    steps = run.saved.steps()
    finished = read_json(run.summary).get("steps") if run.summary.is_file() else None
    return run.export if not steps or steps[-1] == finished else path


def check_model_directory(start: str) -> None:
    """Raises ConfigError where `start` is no model's directory."""
    if not (Path(start) / "config.json").is_file():
        found = f"config.json in {start}" if start else "run that says where it started"
        told = f"expected a HuggingFace directory, found no {found}; name it with --start DIR"
        raise ConfigError(f"--before: {told}.")


def typed(source: Iterable[str]) -> Iterable[str]:
    """A person's questions, one per line; empty lines are passed over."""
    print("A question per line; Ctrl-D leaves.", file=sys.stderr)
    print("? ", end="", flush=True)
    for line in source:
        if line.strip():
            yield line.strip()
        print("? ", end="", flush=True)
    print()


def answer(
    rollout: Rollout,
    engine: Engine,
    question: str,
    temperature: float,
    conversation: Conversation,
) -> None:
    """Tells the conversation how the engine's policy answers, while it writes."""
    from rlflow.rollout.streaming import StreamingEngine

    every = rollout.engines
    task = rollout.environment.task_from_text(question)
    rollout.engines = [StreamingEngine(engine, rollout.tokenizer, conversation)]
    try:
        (group,) = rollout.collect([task], -1, 1, temperature, max_aborted_share=1.0)
    finally:
        rollout.engines = every
    (attempt,) = group.trajectories
    conversation.finish(attempt.stop.value, attempt.error)


def _sort_words(args: argparse.Namespace) -> None:
    """A word that sets a key is no question."""
    if args.question and OVERRIDE.match(args.question):
        args.overrides = [args.question, *args.overrides]
        args.question = None
    elif args.question is not None and not args.question.strip():
        raise ConfigError("ask: the question is empty; write one, or none to be asked for it.")
