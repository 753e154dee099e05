"""What the code costs a reader, as figures to look at: `make house`, or `python -m tests.house`.

The ratchets in tests/unit/test_house.py hold some of them, test_changes.py those of changes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

from tests.changes import CHANGES
from tests.unit.sources import PACKAGES, ROOT, files, nodes

CONFIG = "RunConfig"
OPTIMIZERS = ("torch/optim/adamw.py", "torch/optim/adam.py", "core/optimizer/optimizer.py")
"""Files in which a function called `step` ends the trace: the first update of the weights."""


def functions_that_take(annotation: str) -> list[str]:
    """`file:line name` of the functions of the product with an argument of that annotation."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in files(*PACKAGES, "recipes")
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(
            isinstance(argument.annotation, ast.Name) and argument.annotation.id == annotation
            for argument in (*node.args.args, *node.args.kwonlyargs)
        )
    ]


def functions_to_the_first_step() -> set[tuple[str, str]]:
    """(file, qualified name) of every named function of the product that a run of one process calls
    from `train` to its first optimizer step, its threads' included. In a process of its own."""
    command = [sys.executable, "-m", "tests.house", "--trace"]
    traced = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {(file, name) for file, name in json.loads(traced.stdout.splitlines()[-1])}


def _trace() -> set[tuple[str, str]]:
    import tempfile
    import threading
    from pathlib import Path
    from types import FrameType
    from typing import Any

    import torch

    from rlflow.loop import train
    from tests.flow.letters import letters_config, write_letters_model

    torch.set_num_threads(1)
    called: set[tuple[str, str]] = set()
    ended: list[bool] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or ended:
            return
        if code.co_name == "step" and code.co_filename.endswith(OPTIMIZERS):
            ended.append(True)
        file = code.co_filename.removeprefix(f"{ROOT}/")
        ours = file != code.co_filename and not file.startswith((".venv/", "tests/"))
        if ours and not code.co_name.startswith("<"):
            called.add((file, code.co_qualname))

    with tempfile.TemporaryDirectory() as folder:
        options = ("run.steps=1", "evaluation.at_start=false", "checkpoint.export=false", "metrics.picture=false")  # fmt: skip
        model = write_letters_model(Path(folder) / "model")
        config = letters_config(model, Path(folder) / "runs", *options)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            train(config)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return called


def main() -> None:
    """Prints the figures, the last line as one JSON object."""
    called = functions_to_the_first_step()
    folders = {file.rpartition("/")[0] for file, _ in called}
    figures = {
        "named functions from train to the first optimizer step": len(called),
        "files that they are in": len({file for file, _ in called}),
        "folders that they are in": len(folders),
        f"functions that take the whole {CONFIG}": len(functions_that_take(CONFIG)),
        "modules at the root of rlflow/": len(list((ROOT / "rlflow").glob("[!_]*.py"))),
        **{
            f"files that a new {name} touches": len(change.touched())
            for name, change in CHANGES.items()
        },
    }
    for name, figure in figures.items():
        print(f"{name:58} {figure}")
    print(json.dumps(figures))


if __name__ == "__main__":
    if "--trace" in sys.argv:
        print(json.dumps(sorted(_trace())))
    else:
        main()
