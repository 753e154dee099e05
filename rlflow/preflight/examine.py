"""Opens everything that a training run needs, before anything is built or written, and tells all
problems (`rlflow train --dry-run`, `rlflow doctor --config`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlflow.algorithms.algorithm import MOST_BUDGET, make_transforms
from rlflow.algorithms.teachers.vocabulary import check_tokenizers
from rlflow.algorithms.trial.first_call import check_first_call
from rlflow.components import ADVANTAGE, AGGREGATE, LOSS, TRANSFORM
from rlflow.config.checks import config_checks
from rlflow.config.schema import (
    AlgorithmSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    ModelSection,
    RolloutSection,
    RunConfig,
    RunSection,
)
from rlflow.environment import Environment
from rlflow.errors import (
    ConfigError,
    DataError,
    ModelError,
    Problems,
    RLFlowError,
    StorageError,
)
from rlflow.models.architecture import Architecture, architecture
from rlflow.models.huggingface import read_config
from rlflow.net.addresses import unreachable
from rlflow.preflight.estimates import RunSizes, checkpoint_bytes, run_sizes
from rlflow.preflight.gpu_memory import check_gpu_memory
from rlflow.preflight.host_memory import check_host_memory
from rlflow.preflight.start import policy_architecture, start_checks
from rlflow.rollout.engine_facts import EngineFacts, engine_facts
from rlflow.rollout.environment_calls import shut_down, tasks_of
from rlflow.rollout.recorded import RecordedRollout
from rlflow.rollout.rollout import Rollout
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.run.assemble import (
    environment_class,
    fitting_tasks,
    make_environment,
    rollout_over,
)
from rlflow.run.directory import RunDirectory, run_path
from rlflow.run.gpus import adapters_alone
from rlflow.run.resume import check_continuation
from rlflow.trainer.layout import ParallelLayout
from rlflow.trainer.options import LoraOptions

PROMPTS_READ = 1000  # of each split
GIB = 2**30
MOST = 2**80  # bytes; a message need not tell more


@dataclass
class Readiness:
    """What is known of a configuration. problems: what would stop the run. notes: what is worth a
    look, one line each. samples: a recorded row of each split, trained tokens marked."""

    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)
    model: Architecture | None = None
    sizes: RunSizes | None = None
    fits: bool = False  # the configuration by itself, so that plan and estimates can be made of it


def examine(config: RunConfig, model: bool = True, weights: bool = True) -> Readiness:
    """Opens the model directory, tokenizer, teacher, data, index and environment options, and looks
    at packages, addresses, disk and the run directory. model, weights: they are there, and looked
    at."""
    found = Readiness()
    checks = config_checks(config)
    found.problems.attempt(next(checks))
    if found.problems:  # what stands there is not what the other checks expect
        return found
    for check in checks:
        found.problems.attempt(check)
    found.fits = not found.problems
    for check in (*start_checks(config, model, weights), *_first_calls(config.algorithm)):
        found.problems.attempt(check)
    if model:
        found.model = found.problems.attempt(policy_architecture, config.model.path)
    tokenizer = (
        found.problems.attempt(_policy_tokenizer, config.model, config.rollout, found)
        if found.model is not None
        else None
    )
    environment = _rehearsed(config.environment, found.problems)
    if environment is not None:
        try:
            _look_at_tasks(config, environment, tokenizer, found)
        finally:
            shut_down(environment)
    found.problems.attempt(
        _check_teacher, config.algorithm.teacher, config.trainer.layout, tokenizer
    )
    found.problems.attempt(_check_cluster, config.cluster)
    if not found.problems:
        found.problems.attempt(check_continuation, config)
    engine = engine_facts(config.rollout.engine)
    if config.trainer.lora is not None and not engine.recorded:
        found.notes += _adapter_notes(config.trainer.lora, config.model.dtype, engine)
    if found.model is not None:
        found.sizes = found.problems.attempt(run_sizes, config, found.model)
    if found.sizes is not None:
        found.problems.attempt(_check_disk, config.run, config.checkpoint, found.sizes)
        found.problems.attempt(check_gpu_memory, found.sizes)
        if found.fits:
            found.problems.attempt(check_host_memory, found.sizes)
    return found


def _adapter_notes(lora: LoraOptions, model_dtype: str, engine: EngineFacts) -> list[str]:
    """What becomes of adapters that are merged into the engine's weights."""
    if adapters_alone(lora, engine):
        return []
    why = (
        "trainer.lora.sync=merged" if lora.sync == "merged" else "rollout.engine takes no adapters"
    )
    if engine.dtype(model_dtype) == "float32":
        return [f"{why}: the engine gets whole weights, with the adapters in them"]
    return [
        f"{why}: the engine gets whole weights, rounded to bfloat16, in which most of what the "
        "adapters learn is lost for many updates (sync/adapters_arrived); "
        "rollout.engine.dtype=float32 keeps it, at twice the memory"
    ]


def _policy_tokenizer(
    section: ModelSection, rollout: RolloutSection, found: Readiness
) -> Tokenizer:
    """The policy's tokenizer. Raises ModelError where the model has no embedding for some of its
    tokens, or the chat template does not read an option."""
    path = section.path
    tokenizer = Tokenizer.from_pretrained(path, trust_remote_code=section.trust_remote_code)
    highest = max(tokenizer.inner.get_vocab().values())
    vocab = policy_architecture(path).vocab
    if highest >= vocab:
        raise ModelError(
            f"{path}: the tokenizer has ids up to {highest}, the model an embedding "
            f"for {vocab}: they do not belong "
            "together. Take the tokenizer of this model."
        )
    if not tokenizer.eos_ids:
        found.notes.append(
            f"{path}: the tokenizer has no end-of-sequence token; responses end by "
            "stop strings or limits"
        )
    templated = tokenizer.with_options(rollout.chat_template_options)
    if rollout.chat_template:
        templated.render(
            [{"role": "user", "content": "?"}]
        )  # says itself where there is no template
    return tokenizer


def _first_calls(section: AlgorithmSection) -> list[Callable[[], None]]:
    """Calls of the parts once, on a made-up batch; a start leaves them out, as a part may note what
    it is called with. Filters and curators see the environment's own tasks."""
    parts = [
        (ADVANTAGE, section.advantage, "algorithm.advantage"),
        (AGGREGATE, section.aggregate, "algorithm.aggregate"),
        *((LOSS, one, f"algorithm.losses[{place}]") for place, one in enumerate(section.losses)),
        *(
            (TRANSFORM, one, f"algorithm.transforms[{place}]")
            for place, one in enumerate(section.transforms)
        ),
    ]
    return [partial(check_first_call, *part, tokens=MOST_BUDGET) for part in parts]


def _rehearsed(section: Mapping[str, Any], problems: Problems) -> Environment | None:
    """The environment, as far as it can be had without what is expensive."""
    known = None
    while known is None:
        try:
            known = environment_class(section)
        except ConfigError as problem:
            problems.note(problem)
            if problem.option is None:
                return None
            # What else is wrong is told as well
            section = {key: value for key, value in section.items() if key != problem.option}
    target, options = known
    rehearsal = None if target is None else target.rehearse(**options)
    if rehearsal is None:
        return problems.attempt(make_environment, section)
    environment, wrong = rehearsal
    problems.note(*wrong)
    return environment


def _look_at_tasks(
    config: RunConfig,
    environment: Environment,
    tokenizer: Tokenizer | None,
    found: Readiness,
) -> None:
    """Whether there are tasks, whether their prompts fit, and whether the tokenizer can say what
    the environment waits for."""
    train_split = config.data.train_split
    splits = dict.fromkeys((train_split, config.data.val_split))
    transforms = config.algorithm.transforms
    if tokenizer is None:
        for split in splits:
            found.problems.attempt(tasks_of, environment, split)
        return
    rollout = found.problems.attempt(
        rollout_over, [], environment, tokenizer, config.rollout, config.run
    )
    if rollout is not None:
        found.problems.attempt(make_transforms, transforms, rollout.response_budget)
        for text in environment.stop:
            found.problems.attempt(_check_stop, text, tokenizer)
        for split in splits:
            found.problems.attempt(_count_tasks, rollout, split, config.data, config.rollout, found)
            found.problems.attempt(_check_answers, environment, split, found)
        # A problem with the tasks is noted already
        config.count_steps(len(Problems().attempt(tasks_of, environment, train_split) or []))
        steps, prompts = config.run.steps, config.rollout.prompts_per_step
        notes = found.problems.attempt(_task_notes, environment, config.data, steps, prompts)
        found.notes += notes or []


def _check_answers(environment: Environment, split: str, found: Readiness) -> None:
    """Notes tasks that no response could solve. Raises DataError where all are such."""
    tasks = tasks_of(environment, split)[:PROMPTS_READ]
    problems = {task.id: text for task in tasks if (text := environment.task_problem(task))}
    if not problems:
        return
    first, why = next(iter(problems.items()))
    told = (
        f"split '{split}': {len(problems):,} of the {len(tasks):,} tasks that were looked at could "
        f"not be solved; task '{first}': {why}"
    )
    if len(problems) == len(tasks):
        raise DataError(f"{told}. Fix the prompts or the answers.")
    found.notes.append(told)


def _check_stop(text: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a stop string that no response could end with."""
    tokens = tokenizer.encode(text)
    said = tokenizer.decode(tokens)
    # A special token has no text, and ends a response by itself
    alone = len(tokens) == 1 and tokens[0] in tokenizer.special_ids
    if text not in said and not alone:
        raise ConfigError(
            f"environment: the stop string {text!r} cannot be said with this tokenizer, which "
            f"makes {said!r} of it: responses "
            "would run into the token limit. Take another protocol or model."
        )


def _count_tasks(
    rollout: Rollout, split: str, data: DataSection, section: RolloutSection, found: Readiness
) -> None:
    total = len(tasks_of(rollout.environment, split))
    longest_prompt = data.max_prompt_tokens
    try:
        kept, dropped = fitting_tasks(rollout, split, longest_prompt, first=PROMPTS_READ)
    except DataError:
        if total <= PROMPTS_READ:
            raise
        kept, dropped = fitting_tasks(rollout, split, longest_prompt)
    read = len(kept) + dropped
    if isinstance(rollout, RecordedRollout):
        of = f", the first {read:,} of {total:,}" if read < total else ""
        found.notes.append(f"split '{split}'{of}: {rollout.notes[split]}")
        found.samples.setdefault(split, rollout.samples[split])
        return
    longest = max(len(rollout.prompt_tokens(task)) for task in kept)
    of = f"the first {read:,}" if read < total else "them"
    found.notes.append(
        f"split '{split}': {total:,} tasks; prompts of {of} take up to {longest:,} tokens, "
        f"{dropped:,} are too long"
    )
    first, tokenizer = kept[0], rollout.tokenizer
    chat = section.chat_template or not isinstance(first.prompt, str)
    note = tokenizer.history_note if chat and section.history == "template" else ""
    if note and note not in found.notes:
        found.notes.append(note)
    if section.chat_template_options and not chat:
        found.notes.append(
            f"split '{split}': prompts are text that goes through no chat template, so "
            "rollout.chat_template_options change nothing; set rollout.chat_template=true"
        )
    templated = section.chat_template or not tokenizer.special_ids.isdisjoint(
        rollout.prompt_tokens(first)
    )
    if tokenizer.inner.chat_template and isinstance(first.prompt, str) and not templated:
        found.notes.append(
            f"split '{split}': prompts are used as they stand and hold no token of the model's "
            "chat template; "
            "a chat model expects it: rollout.chat_template=true"
        )


def _task_notes(environment: Environment, data: DataSection, steps: int, prompts: int) -> list[str]:
    """How often the run takes each training task, and which validation tasks are among them.
    prompts: of a step."""
    train, val = (tasks_of(environment, split) for split in (data.train_split, data.val_split))
    if not train:  # which is a problem of its own
        return []
    epochs = steps * prompts / len(train)
    notes = [
        f"{steps:,} x {prompts:,} prompts are {epochs:{',.0f' if epochs >= 10 else '.2g'}} epochs "
        f"of the {len(train):,} tasks "
        f"of split '{data.train_split}'"
    ]
    if len(train) < prompts:
        notes.append(
            f"split '{data.train_split}' has {len(train):,} tasks for {prompts:,} prompts "
            "per step: "
            "each step repeats tasks. Lower rollout.prompts_per_step, or add tasks"
        )
    known = {repr((task.prompt, task.answer)) for task in train}
    copies = sum(repr((task.prompt, task.answer)) in known for task in val)
    if copies:
        notes.append(
            f"{copies:,} of {len(val):,} tasks of split '{data.val_split}' are also in "
            "split "
            f"'{data.train_split}' (same prompt and answer): their scores do not show what "
            "is learned for new tasks"
        )
    return notes


def _check_teacher(
    teacher: Mapping[str, Any], layout: ParallelLayout, tokenizer: Tokenizer | None
) -> None:
    """Raises ConfigError, ModelError where a teacher's model cannot be split, or its tokenizer is
    another; RLFlowError where its server does not answer. What the parts of the algorithm expect of
    it is `check_parts`' matter."""
    path, url = teacher.get("path"), teacher.get("url")
    if isinstance(path, str):
        layout.check_frozen(architecture(read_config(path)))
    directory = path or teacher.get("tokenizer")
    if isinstance(directory, str) and tokenizer is not None:
        check_tokenizers(
            tokenizer,
            directory,
            "algorithm.teacher",
            bool(teacher.get("same_template", True)),
        )
    if isinstance(url, str):
        try:
            address, port = urlsplit(url), urlsplit(url).port
        except ValueError as problem:
            raise ConfigError(f"algorithm.teacher.url: {url}: no address ({problem}).") from None
        check_address(
            "algorithm.teacher.url",
            address.hostname or "",
            port or (443 if address.scheme == "https" else 80),
        )


def _check_cluster(section: ClusterSection) -> None:
    """Raises RLFlowError where nobody answers at `cluster.address`."""
    host, _, port = (section.address or "").removeprefix("ray://").rpartition(":")
    if (section.ranks or section.rollout_workers) and host and port.isdecimal():
        check_address("cluster.address", host, int(port))


def check_address(key: str, host: str, port: int) -> None:
    """Returns where a server takes connections. Raises RLFlowError after a few seconds."""
    reason = unreachable(host, port)
    if reason is not None:
        raise RLFlowError(
            f"{key}: nobody answers at {host}:{port} ({reason}); start the server, or correct the "
            "address."
        )


def _check_disk(run: RunSection, checkpoint: CheckpointSection, sizes: RunSizes) -> None:
    """Raises StorageError where the disk has no room for the checkpoints that are kept, one more,
    and the export, in place of the checkpoints that a run replaces."""
    path = run_path(run)
    ground = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    each, export = checkpoint_bytes(sizes)
    free = shutil.disk_usage(ground).free
    needed = each * (checkpoint.keep + 1) + (export if checkpoint.export else 0)
    if run.resume or run.overwrite:
        saved = RunDirectory(path).saved
        files = (file for step in saved.steps() for file in saved.path(step).rglob("*"))
        needed -= sum(file.stat().st_size for file in files)
    if needed > free:
        each, needed = min(each, MOST), min(needed, MOST)
        raise StorageError(
            f"run.directory: {path}: {checkpoint.keep} checkpoints of {each / GIB:.1f} GiB "
            "each, one more while it is "
            f"written, and the export take {needed / GIB:.1f} GiB more; {free / GIB:.1f} GiB are "
            "free. Lower checkpoint.keep, or choose another disk."
        )
