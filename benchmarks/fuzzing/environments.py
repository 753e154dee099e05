"""Runs whose environment raises, exits, hangs and answers nonsense: they end in time, with what they wrote in order."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from fuzzing.cases import Wrong, trained
from fuzzing.task import settings, write_model

DEADLINE_S = 60.0
PLACES = (
    "",
    "step",
    "step",
    "step_result",
    "reset",
    "close",
    "__init__",
    "tasks",
    "report",
    "shutdown",
)


class Environments:
    """Training runs of two steps."""

    def prepare(self, folder: Path) -> None:
        self._model = write_model(folder / "model")

    def case(self, draw: random.Random, folder: Path) -> bool:
        values = settings(self._model, folder, "Mad")
        values["rollout"]["faults"]["max_aborted_share"] = draw.choice([0.0, 0.25, 1.0])
        options = {
            "seed": draw.randrange(10**6),
            "share": draw.choice([0.02, 0.1, 0.5]),
            "where": draw.choice(PLACES),
        }
        values["environment"] |= options
        values["checkpoint"]["asynchronous"] = draw.random() < 0.3
        ended = trained(values, folder, DEADLINE_S)
        try:
            finished = ended.check(
                (0, 2, 130)
            )  # 130: a KeyboardInterrupt that the environment raised where the user's may come
            self._in_order(folder / "fuzz", whole=finished)
            if (folder / "fuzz" / "checkpoints").is_dir() and not finished and draw.random() < 0.5:
                values["environment"] |= {"share": 0.0}
                trained(values, folder, DEADLINE_S, "--resume").check((0,))
                self._in_order(folder / "fuzz", whole=True)
        except Wrong as found:
            raise Wrong(f"{options}: {found}") from None
        return finished

    def close(self) -> dict[str, float]:
        return {}

    def _in_order(self, run: Path, whole: bool) -> None:
        """Raises Wrong where the metrics are no finite numbers, or hold a step of training twice, or lack one."""
        if not (run / "metrics.jsonl").is_file():
            if whole:
                raise Wrong("a finished run without metrics")
            return
        trained = []
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if not all(
                math.isfinite(value) for value in record.values() if isinstance(value, float)
            ):
                raise Wrong(f"not finite: {line}")
            if "train/loss" in record:
                trained.append(record["step"])
        if len(set(trained)) != len(trained) or (whole and trained != [1, 2]):
            raise Wrong(f"steps {trained} in metrics.jsonl")
        for file in sorted((run / "trajectories").glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                json.loads(line)
