"""`rlflow eval`: scores of a model directory, a run or a checkpoint."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.commands.arguments import (
    Commands,
    add_command,
    add_model_options,
    add_options,
    check_least,
    flag,
    option,
    option_overrides,
)
from rlflow.errors import ConfigError, StorageError
from rlflow.report.metrics import Metrics, shown
from rlflow.texts import one_line, printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rlflow.config.schema import EvaluationSection, RolloutSection, RunConfig, RunSection
    from rlflow.rollout import Rollout
    from rlflow.run.evaluate import Evaluation, Spread
    from rlflow.run.origin import ModelDirectory


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "eval",
        run,
        "evaluate a model: a HuggingFace directory, a run, or a checkpoint",
        """
        Lets a model attempt the validation tasks of an environment, reports its scores with 95%
        intervals and the environment's other metrics, and writes every trajectory. A task that
        failed for infrastructure is reported apart.
        """,
        """
        rlflow eval --model runs/my-run/export
        rlflow eval --model runs/my-run/adapter    # over the base that it names, or --hf DIR
        rlflow eval --model runs/my-run/checkpoints/step_000100    # converted beside it first
        rlflow eval --model Qwen2.5-3B --config my.yaml --data tasks.jsonl --questions 500
        rlflow eval --server http://localhost:8000/v1 --config my.yaml
        rlflow eval --model DIR --config my.yaml --samples 8 --temperature 0.3,0.6,1.0
        """,
    )
    model = "HuggingFace directory (e.g. a run's export/), a LoRA adapter's, a name on the hub, a run (newest"
    option(parser, "--model", "PATH", f"{model} checkpoint) or a Megatron checkpoint")
    server = "in place of --model: an OpenAI-compatible chat server, e.g. http://localhost:8000/v1"
    option(parser, "--server", "URL", f"{server}; text, no exact tokens")
    option(
        parser,
        "--server-model",
        "NAME",
        "the model's name there (default: the only one)",
    )
    key = "environment variable with the server's key"
    option(parser, "--api-key-variable", "NAME", key, default="OPENAI_API_KEY")
    add_model_options(parser)
    temperature = "0 is greedy; of several, as 0.3,0.6,1.0, each is tried (default 0)"
    option(parser, "--temperature", "T", temperature, type=temperatures)
    option(
        parser,
        "--data",
        "PATH",
        "validation tasks, in a form that the environment reads",
    )
    out = "for summary.json and trajectories.jsonl (default: a new runs/eval-NAME)"
    option(parser, "--out", "DIR", out)
    flag(parser, "--overwrite", "replace an earlier evaluation in --out")
    option(parser, "--questions", "N", "only the first N tasks", type=int)
    option(parser, "--samples", "N", "attempts per task (default 1)", type=int)
    add_options(parser, "eval")


def temperatures(text: str) -> list[float]:
    """Numbers between commas, each once. Raises ArgumentTypeError."""
    try:
        return list(dict.fromkeys(map(float, text.split(","))))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers with commas between them, as 0.3,0.6,1.0, found '{text}'"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Prints the scores of a model directory and writes summary.json and trajectories.jsonl, of
    several temperatures in a folder each."""
    from rlflow.config.checks import check_config
    from rlflow.run.assemble import fitting_tasks, make_rollout
    from rlflow.run.evaluate import evaluate, load_adapter, spread

    check_least(args, questions=1, samples=1)
    for value in args.temperature or []:
        if not 0 <= value < math.inf:
            raise ConfigError(f"--temperature: expected at least 0, found {value}.")
    _check_out(args.out, args.overwrite)
    here = Path.cwd()
    with _named(args) as model:
        config = evaluation_config(args, model)
        check_config(config)
        _check_plays(config.rollout.engine)
        asked = asked_evaluation(args, config.evaluation)
        name = model.name
        if args.server is None:
            rollout = make_rollout(config)
        else:
            rollout = _server_rollout(args, config.environment, config.rollout, config.run)
        with rollout:
            if model.adapter is not None:
                load_adapter(rollout, model.adapter)
            registered = rollout.environment.metrics
            tasks, dropped = fitting_tasks(
                rollout, config.data.val_split, config.data.max_prompt_tokens
            )
            tasks = tasks[: asked.questions]
            results = {}
            for temperature in args.temperature or [asked.temperature]:
                attempts = f"{asked.samples_per_prompt} attempt(s) each"
                told = f"{len(tasks)} tasks, {attempts}, temperature {temperature:g}"
                print(told, file=sys.stderr)
                results[temperature] = evaluate(
                    rollout,
                    tasks,
                    samples_per_prompt=asked.samples_per_prompt,
                    temperature=temperature,
                )
    if here != Path.cwd():
        os.chdir(here)  # what was asked for is written where it was asked
    out = Path(args.out or Path("runs") / f"eval-{name}")
    written = []
    try:
        out = out if args.out else new_directory(out.parent, out.name)
        for temperature, result in results.items():
            folder = out
            if len(results) > 1:
                folder = out / f"temperature-{temperature:g}"
                print(f"temperature {temperature:g}")
            facts = {
                "model": str(args.model or args.server),
                "temperature": temperature,
                "prompts_dropped": dropped,
            }
            _report(result, facts, registered, folder)
            written.append(str(folder))
    except OSError as error:
        raise StorageError(f"--out: {out} cannot be written ({error.strerror}).") from error
    if asked.samples_per_prompt > 1:
        spreads = {key: spread(result.groups, registered) for key, result in results.items()}
        print(spread_table(spreads, asked.samples_per_prompt))
    print(f"wrote summary.json and trajectories.jsonl in {', '.join(written)}")
    return 0


def _report(
    result: Evaluation, facts: Mapping[str, Any], registered: Metrics, folder: Path
) -> None:
    """Prints an evaluation, and writes its files. Raises OSError."""
    from rlflow.report.metrics import save_registered
    from rlflow.report.records import write_trajectories
    from rlflow.run.directory import RunDirectory
    from rlflow.run.evaluate import failure_reasons, means_over_sets, metrics_by_set
    from rlflow.storage.files import write_json

    by_set = metrics_by_set(result.groups, registered)
    means = means_over_sets(by_set, registered)
    failures = failure_reasons(result.groups)
    summary = {**facts, **result.metrics}
    if failures:
        summary["failures"] = failures
    if by_set:
        summary["sets"] = by_set
        summary |= {f"{name}_mean_over_sets": value for name, value in means.items()}
    _print_scores(result.metrics, by_set, means, registered)
    for reason, count in failures.items():
        print(f"{count} FAILED: {printable(reason)}")
    write_trajectories(folder / "trajectories.jsonl", result.groups)
    save_registered(RunDirectory(folder).environment_metrics, registered)
    write_json(folder / "summary.json", summary)


def spread_table(spreads: Mapping[float, Spread], samples: int) -> str:
    """By temperature: pass@1, pass@`samples`, and the share of groups that teach something."""
    heads = ("temperature", "pass@1", f"pass@{samples}", "groups that differ")
    lines = ["  ".join(heads)]
    for temperature, found in spreads.items():
        values = (
            f"{temperature:g}",
            f"{found.pass_1:.3f}",
            f"{found.pass_all:.3f}",
            f"{found.differing:.0%}",
        )
        lines.append(
            "  ".join(f"{one:>{len(head)}}" for one, head in zip(values, heads, strict=True))
        )
    lines.append("Algorithms that compare attempts learn from groups that differ in reward alone.")
    return "\n".join(lines)


def _named(args: argparse.Namespace) -> AbstractContextManager[ModelDirectory]:
    """The model. Raises ConfigError unless one of a model and a server is given."""
    from rlflow.run.origin import ModelDirectory, model_directory

    if (args.model is None) == (args.server is None):
        raise ConfigError("rlflow eval: expected one of --model PATH and --server URL.")
    if args.server is not None:
        name = (args.server_model or "server").rpartition("/")[2]
        return nullcontext(ModelDirectory(Path(), name, None))
    say = partial(print, file=sys.stderr)
    return model_directory(args.model, args.hf, say, adapters=True)


def _check_plays(engine: Mapping[str, Any]) -> None:
    """Raises ConfigError for an engine that samples nothing."""
    from rlflow.rollout.engine_facts import engine_facts

    if engine_facts(engine).recorded:
        raise ConfigError(
            "rlflow eval: the model's run imitated recordings (rollout.engine=recorded), and says "
            "no environment to play in; name one: --config FILE, or --env NAME "
            "rollout.engine=embedded. Its loss on held-out rows is in the run's metrics."
        )


def _server_rollout(
    args: argparse.Namespace,
    environment: Mapping[str, Any],
    section: RolloutSection,
    run: RunSection,
) -> Rollout:
    """The rollout over a chat server that somebody else keeps."""
    from rlflow.rollout.chat_engine import WARNING, ChatEngine, PiecedText
    from rlflow.run.assemble import make_environment, rollout_over

    text: Any = PiecedText(section.chat_template_options)
    named = {"model": args.server_model, "api_key_variable": args.api_key_variable}
    engine = ChatEngine(args.server, text, **named)
    try:
        rollout = rollout_over([engine], make_environment(environment), text, section, run)
    except BaseException:
        engine.hang_up()
        raise
    print(f"warning: {WARNING}\nmodel: {engine.model}", file=sys.stderr)
    return rollout


def _check_out(given: str | None, overwrite: bool) -> None:
    """Raises ConfigError where a run or an earlier evaluation is, or nothing can be written."""
    from rlflow.storage.files import why_unwritable

    out = Path(given or "runs")
    if (reason := why_unwritable(out)) is not None:
        raise ConfigError(f"--out: {reason}; give another folder.")
    if given is None:
        return
    if any((out / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(f"--out: {out} is a run's directory; give another folder.")
    earlier = [*out.glob("summary.json"), *out.glob("temperature-*/summary.json")]
    if earlier and not overwrite:
        advice = "give another folder, or --overwrite to replace it"
        raise ConfigError(f"--out: {out} already holds an evaluation; {advice}.")


def new_directory(parent: Path, name: str) -> Path:
    """Makes and returns `parent/name`, or the first of `name-2`, `name-3`, ... that is free."""
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def _print_scores(
    metrics: Mapping[str, float],
    by_set: Mapping[str, Mapping[str, float]],
    means: Mapping[str, float],
    registered: Metrics,
) -> None:
    from rlflow.report.lines import evaluation_line

    for name, values in by_set.items():
        print(f"{one_line(name) + ':':17}{evaluation_line(values, registered)}")
    for name, value in means.items():
        print(f"{'mean over sets:':17}{shown(name, registered[name], value)}")
    line = evaluation_line(metrics, registered)
    print(f"{'all tasks:':17}{line}" if by_set else line)


def asked_evaluation(args: argparse.Namespace, configured: EvaluationSection) -> EvaluationSection:
    """Questions, attempts and temperature: of the options; else of the configuration that a file
    of another system was translated to; else all, one and greedy. A file of ours says how a run
    evaluates between its steps, which is not this."""
    from rlflow.config.foreign import foreign_file
    from rlflow.config.schema import EvaluationSection

    foreign = args.config is not None and foreign_file(args.config) is not None
    section = configured if foreign else EvaluationSection()
    options = {
        "questions": args.questions,
        "samples_per_prompt": args.samples,
        "temperature": args.temperature and args.temperature[0],
    }
    return replace(section, **{key: value for key, value in options.items() if value is not None})


def evaluation_config(args: argparse.Namespace, model: ModelDirectory) -> RunConfig:
    """The evaluation's configuration: --config, else what `trusted` takes of the model's run."""
    from rlflow.commands.translate import summary
    from rlflow.config.checks import environment_name
    from rlflow.config.foreign import read_config
    from rlflow.config.schema import load_config
    from rlflow.run.evaluate import adapter_options
    from rlflow.run.origin import trusted
    from rlflow.run.places import enter_project

    source = args.config or model.config
    if source and source != args.config and not args.allow_code:
        source = trusted(source)
    overrides = option_overrides(args, "eval")
    path, data = model.path, args.data
    if isinstance(source, (str, Path)):
        here, file = Path.cwd(), Path(source).absolute()
        overrides = enter_project(file, overrides)
        if Path.cwd() != here:
            source, path, data = file, here / path, data and str(here / data)
    if isinstance(source, dict):
        config = load_config(source, overrides)
    else:
        config, translation = read_config(source, overrides)
        if translation is not None:
            print(summary(str(source), translation), file=sys.stderr)
    if data:
        environment_name(config.environment)  # there must be one
        config.environment |= data_options(config.environment, data)
    config.model.path = str(path)
    # Of the run that it is from: what is evaluated has its adapters merged in, or beside it
    lora = None
    if model.adapter is not None:
        lora = adapter_options(model.adapter, config.rollout.engine)
    config.trainer = replace(config.trainer, lora=lora)
    return config


def data_options(environment: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The constructor keywords by which an environment, or its `base`, reads the data at `path`.

    Raises ConfigError where it takes no data."""
    from rlflow.components import ENVIRONMENT
    from rlflow.environment import Environment

    base = environment.get("base")
    if isinstance(base, str) and (base in ENVIRONMENT.names() or ":" in base):
        base = {"name": base}
    if isinstance(base, Mapping) and "name" in base:
        return {"base": {**base, **data_options(base, path)}}
    name = environment["name"]
    target = ENVIRONMENT.resolve(name)
    if not (isinstance(target, type) and issubclass(target, Environment)):
        raise ConfigError(
            f"--data: the environment {name} is made by a function, which takes no data by itself, "
            f"found {path}; leave --data out, and set what it takes with environment.KEY=VALUE."
        )
    return target.evaluation_options(path)
