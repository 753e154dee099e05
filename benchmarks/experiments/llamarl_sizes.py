"""LlamaRL: weights handed over in place of saved and loaded, by the size of the model."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from experiments.base import (
    TRAINING,
    Experiment,
    Figures,
    Results,
    Verdict,
    all_of,
    average,
    values,
)

SIZES = ("tiny", "18M", "93M")
ROUNDS = 5
AT_LARGEST = 2.0


def run(arm: str, seed: int, quick: bool) -> Figures:
    """direct_s, file_s: the median seconds until the engine has the trainer's weights, handed over in process and through a
    directory; saved_s: what lies between; times: their ratio."""
    import statistics
    import tempfile

    from asynchronous import write_model
    from safetensors.torch import load_file

    from experiments.tiny import tiny
    from rlflow.models.weight_files import write_model as export

    direct, through = [], []
    with (
        tempfile.TemporaryDirectory(prefix="rlflow-weights-") as folder,
        tiny(
            seed, "trainer.backend=megatron", model=lambda path: write_model(path, arm) and None
        ) as made,
    ):
        for number in range(1, 2 if quick else 1 + ROUNDS):
            began = time.perf_counter()
            made.rollout.load_weights(made.trainer.weights(), 2 * number - 1)
            direct.append(time.perf_counter() - began)
            began = time.perf_counter()
            export(
                Path(folder) / "saved",
                made.trainer.weights(),
                made.config.model.path,
                overwrite=True,
            )
            found = [
                pair
                for file in Path(folder, "saved").glob("*.safetensors")
                for pair in load_file(file).items()
            ]
            made.rollout.load_weights(found, 2 * number)
            through.append(time.perf_counter() - began)
    direct_s, file_s = statistics.median(direct), statistics.median(through)
    return {
        "direct_s": direct_s,
        "file_s": file_s,
        "saved_s": file_s - direct_s,
        "times": file_s / direct_s,
    }


def judge(results: Results) -> Verdict:
    saved = [values(results, arm, "saved_s") for arm in SIZES]
    grows = all(
        less < more for one, other in pairwise(saved) for less, more in zip(one, other, strict=True)
    )
    times = average(results, SIZES[-1], "times")
    return all_of(
        (min(map(min, saved)) > 0, "handed over they are there sooner at every size"),
        (
            grows,
            "seconds saved: "
            + ", ".join(f"{average(results, arm, 'saved_s'):.3f} ({arm})" for arm in SIZES),
        ),
        (times >= AT_LARGEST, f"{times:.1f} times as fast with {SIZES[-1]}"),
    )


EXPERIMENT = Experiment(
    name="llamarl_sizes",
    system="LlamaRL: direct weight sync, by size",
    claim="The gain over a synchronous run whose weights go through files grows with the model: 2.5 times (8B), 4.0 (70B), 10.7 "
    "(405B; arXiv 2505.24034).",
    setup="Weights of 1.3M, 18M and 93M parameters, from the Megatron trainer to the embedded engine, handed over in process "
    "(with the hashes of a sync) or written as a HuggingFace directory, read and loaded; the median of 5. No GPU, and not the "
    "gain of overlapping, which `asyncflow` measures.",
    rule="Handed over the weights are there sooner at every size in every seed, the seconds saved grow from size to size, and "
    f"at the largest it is {AT_LARGEST:g} times as fast in the mean.",
    arms=SIZES,
    columns=("direct_s", "file_s", "saved_s", "times"),
    run=run,
    judge=judge,
    imports=(*TRAINING, "rlflow.trainer.megatron.megatron_trainer"),
)
