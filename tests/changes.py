"""The typical changes of a developer: what each adds and edits, and that it works then.

`python -m tests.changes` prints how many files of the product each touches; docs and the change's
own test come beside it. tests/unit/test_changes.py holds the figures and makes the changes, in a
copy of the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rlflow", "environments", "tools", "recipes")


@dataclass(frozen=True)
class Insertion:
    """A text that goes behind the only place of a file with another."""

    behind: str
    text: str


@dataclass(frozen=True)
class Change:
    """aim: most files that it may touch, a new folder counting once. added: path -> text. edited:
    path -> what is inserted. works: raises where the change, once made, does not work."""

    aim: int
    works: Callable[[], None]
    added: Mapping[str, str]
    edited: Mapping[str, Sequence[Insertion]] = field(default_factory=dict)

    def touched(self) -> list[str]:
        """Files and new folders of the product."""
        places = {
            path if (ROOT / path).parent.is_dir() else f"{Path(path).parent}/"
            for path in self.added
        }
        return sorted({*places, *self.edited})

    def make(self, root: Path) -> None:
        """Makes the change in the sources at `root`."""
        for path, text in self.added.items():
            assert not (root / path).exists(), f"{path} is there already"
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        for path, insertions in self.edited.items():
            text = (root / path).read_text(encoding="utf-8")
            for insertion in insertions:
                assert text.count(insertion.behind) == 1, f"{path}: {insertion.behind!r}"
                text = text.replace(insertion.behind, insertion.behind + insertion.text)
            (root / path).write_text(text, encoding="utf-8")


# ---------------------------------------------------------------- a model family

FAMILY = '''"""A made-up family: Qwen3 without the norm of keys."""

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT, Q_NORM

FAMILY = ModelFamily(rules=(EMBEDDING, *DENSE_LAYER, Q_NORM, FINAL_NORM, OUTPUT))
'''


def family_works() -> None:
    """tests/unit/models/test_families.py converts, exports and samples from such a family."""
    from rlflow.models.architecture import architecture, huggingface_shapes

    config = {
        "model_type": "halfnormed",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    names = set(huggingface_shapes(architecture(config)))
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert "model.layers.0.self_attn.k_norm.weight" not in names


# ---------------------------------------------------------------- an engine

ENGINE = '''"""Says the prompt again."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.rollout.engine import Completion, FixedEngine, Sampling
from rlflow.rollout.engine_facts import EngineFacts, EngineLoad
from rlflow.values import PositiveInt


class ParrotFacts(EngineFacts):
    """The tokens of its longest answer."""

    in_process = True
    memory_known = True

    def memory(self, load: EngineLoad, free: int | None = None) -> dict[str, int]:
        return {"an answer": 8 * int(self.options.get("longest", 16))}


class ParrotEngine(FixedEngine):
    """The first `longest` tokens of a prompt, as if they were certain."""

    facts = ParrotFacts

    def __init__(self, *, longest: PositiveInt = 16) -> None:
        self._longest = longest

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        said = list(tokens[: min(self._longest, sampling.max_tokens)])
        return Completion(said, [0.0] * len(said), [0] * len(said), "length")


ENGINE = ParrotEngine
'''


def engine_works() -> None:
    import asyncio

    from rlflow.components import ENGINE
    from rlflow.config.loading import load_config
    from rlflow.config.schema import RunConfig
    from rlflow.rollout.engine import Sampling
    from rlflow.rollout.engine_facts import engine_facts

    component = {"name": "parrot", "longest": 3}
    said = asyncio.run(ENGINE.build(component).generate([5, 6, 7, 8], Sampling(max_tokens=9)))
    assert said.tokens == [5, 6, 7]
    facts = engine_facts(component)
    assert facts.in_process and facts.memory_known and type(facts).__name__ == "ParrotFacts"
    overrides = ["environment.name=mathematics", "rollout.engine.name=parrot"]
    assert load_config(None, overrides, RunConfig).rollout.engine["name"] == "parrot"


# ---------------------------------------------------------------- a retriever

RETRIEVER = '''"""Passages by the words that they share with the query."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.base import (
    CorpusRetriever,
    Ranking,
    RetrieverFacts,
    with_facts,
)


class SharedWords:
    """Ranks by the number of shared words."""

    def __init__(self, corpus: Sequence[Passage]) -> None:
        self._words = [set(passage.contents.lower().split()) for passage in corpus]

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._rank(set(query.lower().split()), top_k) for query in queries]

    def _rank(self, query: set[str], top_k: int) -> Ranking:
        shared = [(row, float(len(words & query))) for row, words in enumerate(self._words)]
        found = [pair for pair in shared if pair[1]]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:top_k]


@with_facts(RetrieverFacts(package="no_such_package", extra="words", shared=False))
def shared_words(corpus: Sequence[Passage]) -> CorpusRetriever:
    return CorpusRetriever(corpus, SharedWords(corpus))


RETRIEVER = shared_words
'''


def retriever_works() -> None:
    from rlflow.errors import ConfigError
    from rlflow_environments.retrieval.corpus import Passage
    from rlflow_environments.retrieval.indices import make_retriever
    from rlflow_environments.retrieval.indices.make import retriever_facts
    from rlflow_environments.retrieval.server.process import check_sharable

    passages = [Passage(str(row), "", text, "") for row, text in enumerate(["a b", "b c", "d"])]
    (found,) = make_retriever("shared_words", passages).search(["c b"], 2)
    assert [(hit.id, hit.score) for hit in found] == [("1", 2.0), ("0", 1.0)]
    assert retriever_facts("shared_words").package == "no_such_package"
    try:
        check_sharable({"name": "shared_words"}, 2)
    except ConfigError as error:
        assert "shared_words" in str(error)
    else:
        raise AssertionError("several processes may have it")


# ---------------------------------------------------------------- an environment

ENVIRONMENT = '''"""Words to say back."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt


class Echoes(Environment):
    """One turn: reward 1 for a response that holds the word."""

    max_turns = 1
    metrics = {"right": Metric("share", "of words said back", score=True)}

    def __init__(self, *, words: PositiveInt = 8) -> None:
        self._words = words

    def tasks(self, split: str) -> Sequence[Task]:
        words = [f"{split}{number}" for number in range(self._words)]
        return [Task(word, f"Say {word}: ", answer=word) for word in words]

    def step(self, episode: Episode, response: str) -> Step:
        right = float(str(episode.task.answer) in response)
        return Step("", right, True, {"right": right})
'''
ENTRY_POINTS = """[rlflow.environments]
echoes = rlflow_environments.echoes.environment:Echoes
"""


def environment_works() -> None:
    from rlflow_tools.kit.checks.environments import check_environment

    from rlflow.components import ENVIRONMENT

    made = ENVIRONMENT.build({"name": "echoes", "words": 3})
    report = check_environment(made, episodes=4)
    assert report.passed, str(report)


# ---------------------------------------------------------------- a reward wrapper

WRAPPER = '''"""Rewards times a factor."""

from __future__ import annotations

import dataclasses

from rlflow.types import Episode, Step
from rlflow_environments.wrappers.wrapper import Base, Seen, Wrapper


class ScaledRewards(Wrapper):
    """The base's rewards, times `factor`."""

    def __init__(self, base: Base, *, factor: float = 0.5) -> None:
        super().__init__(base)
        self._factor = factor

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        return dataclasses.replace(step, reward=self._factor * step.reward)


WRAPPER = ScaledRewards
'''


def wrapper_works() -> None:
    from rlflow.components import ENVIRONMENT
    from tests.unit.environments.wrappers.small import Rooms, played

    wrapped = ENVIRONMENT.build({"name": "scaled", "factor": 3.0}, base=Rooms())
    steps = played(wrapped, "on\n", "on, and out\n")
    assert [step.reward for step in steps] == [0.0, 6.0]


# ---------------------------------------------------------------- a loss, an advantage

LOSS = '''"""Half squares of log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, check_annotated


@dataclass(frozen=True)
class SquareLoss(Loss):
    """coefficient * log-prob^2 / 2 of every trained token."""

    coefficient: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        trained = torch.where(batch.loss_mask, output.logprobs, 0.0)
        return self.coefficient * trained.square() / 2, {}
'''
ADVANTAGE = '''"""Signs of what attempts have above their group."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.statistics import group_moments, standardized
from rlflow.types import Batch


@compares_attempts
def signs(batch: Batch) -> Tensor:
    """(B,) float32: 1 above the mean reward of the group, -1 below it."""
    moments = group_moments(batch, "advantage signs")
    centred = standardized(batch.require("rewards", "advantage signs"), moments, "none", 0.0)
    return centred.sign().float()
'''
LOSS_LINE = '    "square": "rlflow.algorithms.losses.square:SquareLoss",\n'
ADVANTAGE_LINE = '    "signs": "rlflow.algorithms.advantages.signs:signs",\n'


def loss_works() -> None:
    part_works("square", coefficient=2.0)


def advantage_works() -> None:
    part_works("signs")


def part_works(name: str, **keywords: float) -> None:
    """By the contract of its kind, which is found by the name alone."""
    from rlflow_tools.kit.checks.parts import check_algorithm

    report = check_algorithm(name, **keywords)
    assert report.passed, str(report)


# ---------------------------------------------------------------- a command

COMMAND = '''"""`rlflow families`: the model families."""

from __future__ import annotations

import argparse

from rlflow.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Adds the command."""
    what = "names of the model families"
    add_command(commands, "families", run, what, what, "rlflow families")


def run(args: argparse.Namespace) -> None:
    """Prints the names."""
    from rlflow.models.families import SHIPPED

    print(*sorted(SHIPPED))
'''


def command_works() -> None:
    import contextlib
    import io

    from rlflow.commands.cli import main, make_parser

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["families"]) == 0
    assert "qwen3" in printed.getvalue().split()
    assert "names of the model families" in make_parser().format_help()


# ---------------------------------------------------------------- a metric on the live page

METRIC = """    "rollout/segments": Metric(
        "per episode", "training sequences", shown="segments {:.1f}", chart=True
    ),
"""
MEASURED = """        "rollout/segments": mean([float(len(one.segments)) for one in usable]),
"""


def metric_works() -> None:
    from rlflow_tools.view.charts import run_svg
    from rlflow_tools.view.page import overview

    from rlflow.report.reductions import rollout_metrics
    from rlflow.types import StopReason, Trajectory

    episodes = [
        Trajectory(str(count), "g", [None] * count, [], 0.5, StopReason.TERMINATED)  # type: ignore[list-item]
        for count in (1, 2)
    ]
    records = [{"step": step, **rollout_metrics(episodes, {})} for step in (1, 2)]
    assert "<li>segments 1.5</li>" in overview(records, {}, {})
    assert "segments (training) 1.50" in run_svg(records, {})


TABLE = "BUILT_IN = {\n"
CHANGES = {
    "model family": Change(1, family_works, {"rlflow/models/families/halfnormed.py": FAMILY}),
    "rollout engine": Change(1, engine_works, {"rlflow/rollout/engines/parrot.py": ENGINE}),
    "retriever": Change(
        1, retriever_works, {"environments/retrieval/retrievers/shared_words.py": RETRIEVER}
    ),
    "environment": Change(
        1,
        environment_works,
        {
            "environments/echoes/__init__.py": "",
            "environments/echoes/environment.py": ENVIRONMENT,
            "environments/echoes/entry_points.ini": ENTRY_POINTS,
        },
    ),
    "reward wrapper": Change(1, wrapper_works, {"environments/wrappers/scaled.py": WRAPPER}),
    "loss": Change(
        2,
        loss_works,
        {"rlflow/algorithms/losses/square.py": LOSS},
        {"rlflow/algorithms/losses/__init__.py": [Insertion(TABLE, LOSS_LINE)]},
    ),
    "advantage": Change(
        2,
        advantage_works,
        {"rlflow/algorithms/advantages/signs.py": ADVANTAGE},
        {"rlflow/algorithms/advantages/__init__.py": [Insertion(TABLE, ADVANTAGE_LINE)]},
    ),
    "command": Change(
        2,
        command_works,
        {"rlflow/commands/families.py": COMMAND},
        {
            "rlflow/commands/cli.py": [
                Insertion("from rlflow.commands import config, doctor, eval, ", "families, "),
                Insertion("CORE = {\n", '    "families": families.add,\n'),
            ]
        },
    ),
    "metric on the live page": Change(
        2,
        metric_works,
        {},
        {
            "rlflow/report/metrics.py": [Insertion("METRICS: Metrics = {\n", METRIC)],
            "rlflow/report/reductions.py": [
                Insertion('"rollout/episodes": float(len(trajectories)),\n', MEASURED)
            ],
        },
    ),
}
"""What is changed -> how."""


def copy_with_all(root: Path) -> None:
    """Makes all changes in a copy of the sources at `root`, with the metadata of an installation.
    PYTHONPATH=root imports it."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder)
    for file in ("setup.py", "README.md"):
        shutil.copy2(ROOT / file, root / file)
    for name, folder in (("rlflow_environments", "environments"), ("rlflow_tools", "tools")):
        (root / name).symlink_to(folder)
    for change in CHANGES.values():
        change.make(root)
    metadata = [sys.executable, "setup.py", "-q", "egg_info"]
    subprocess.run(metadata, cwd=root, check=True, capture_output=True)


def tried(root: Path) -> dict[str, str]:
    """{change: what is wrong, or nothing} of the changed copy at `root`, in one process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    command = [sys.executable, "-m", "tests.changes", "--try"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    wrong: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return wrong


def _try() -> dict[str, str]:
    import rlflow

    assert Path(rlflow.__file__).is_relative_to(Path.cwd()), "the sources, and not their copy"
    wrong = {}
    for name, change in CHANGES.items():
        try:
            change.works()
            wrong[name] = ""
        except (Exception, SystemExit):  # noqa: BLE001 -- the other changes are tried too
            wrong[name] = traceback.format_exc()
    return wrong


def main() -> None:
    """Prints the table."""
    for name, change in CHANGES.items():
        touched = change.touched()
        print(f"{name:24} {len(touched)} of {change.aim}   {', '.join(touched)}")


if __name__ == "__main__":
    if "--try" in sys.argv:
        print(json.dumps(_try()))
    else:
        main()
