"""The order of scripts in RLinf's documentation of Search-R1, each as it is written there, with a local stand-in of the hub:
download, build_index, launch_server, run_train, convert, run_eval.

    python3 tests/flow/seed_order.py FOLDER       # from a fresh clone: the first script makes .venv

Needs the standard library alone; what needs more is asked of the scripts' own Python.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.append(str(ROOT))

from tests.unit.recipes.hub_stub import Hub, served  # noqa: E402

THEIRS = ROOT / "tests" / "unit" / "recipes" / "foreign"
TOWNS = [
    "Ada",
    "Bern",
    "Cork",
    "Dale",
    "Eton",
    "Faro",
    "Gera",
    "Hove",
    "Imst",
    "Jena",
    "Kiel",
    "Lund",
    "Mons",
    "Nice",
    "Oslo",
    "Pisa",
]
CPU = [
    "cluster.ranks=0",
    "cluster.gpus_per_rank=0",
    "rollout.engine=embedded",
    "model.dtype=float32",
    "trainer.distributed_optimizer=false",
    "trainer.offload_snapshots=false",
    "trainer.release_gradients=false",
    "rollout.max_total_tokens=1024",
    "rollout.max_response_tokens=48",
    "data.max_prompt_tokens=256",
]
SMALL = [
    "run.steps=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "checkpoint.every_steps=1",
    "checkpoint.export=false",
    "metrics.picture=false",
    "evaluation.questions=4",
]
POLICY = ROOT / "recipes" / "searchr1" / "starting_policy"  # tiny, and it searches
ENCODER = """
import sys
from pathlib import Path
from tests.unit.environments.retrieval.search_models import write_bert
write_bert(Path(sys.argv[1]))
"""


def rows(*values: dict) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def releases() -> dict[str, dict[str, bytes]]:
    """Small data sets in the form of the releases that the documentation names."""
    corpus = [
        {"contents": f'"{town}"\n{town} lies on the river {town[::-1]}.', "url": f"w/{town}"}
        for town in TOWNS
    ]
    asked = [
        {
            "prompt": f"Question: Which river does {town} lie on?\n",
            "solutions": [town[::-1]],
        }
        for town in TOWNS
    ]
    pages = [{"url": f"w/{town}", "contents": town} for town in TOWNS]
    return {
        "inclusionAI/ASearcher-Local-Knowledge": {
            "wiki_corpus.jsonl": rows(*corpus),
            "wiki_webpages.jsonl": rows(*pages),
            "wikilinks.jsonl": b"{}\n",
        },
        "RLinf/Search-R1-Data": {"train.jsonl": rows(*asked)},
    }


class Follower:
    """Runs the scripts one after the other. seconds: of each."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.hub = hub
        self.variables = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hub"),
            "WIKI2018_WORK_DIR": str(folder / "wiki2018"),
            "OMP_NUM_THREADS": "1",
        }
        self.seconds: dict[str, float] = {}

    def run(self, name: str, command: Sequence[str | Path]) -> str:
        """What the command prints. Raises RuntimeError where it fails."""
        started = time.monotonic()
        done = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        if done.returncode:
            raise RuntimeError(
                f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def script(self, name: str, *arguments: str | Path) -> str:
        return self.run(name, ["bash", ROOT / "recipes" / "searchr1" / f"{name}.sh", *arguments])


def serve(follower: Follower, port: int) -> subprocess.Popen[bytes]:
    """The retrieval server, once it can answer."""
    started = time.monotonic()
    command = ["bash", str(ROOT / "recipes" / "searchr1" / "launch_server.sh")]
    with (follower.folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**follower.variables, "PORT": str(port)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while time.monotonic() - started < 200 and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
        except OSError:
            time.sleep(0.3)
            continue
        follower.seconds["launch_server"] = time.monotonic() - started
        return server
    end(server)
    raise RuntimeError(
        f"launch_server.sh is not ready after 200 s:\n{(follower.folder / 'server.log').read_text()[-3000:]}"
    )


def end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def filled(source: str, target: Path, places: dict[str, str]) -> Path:
    """A configuration of RLinf with the paths that its documentation has the user write into it."""
    text = (THEIRS / source).read_text()
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    target.write_text(text)
    return target


def follow(folder: Path) -> dict[str, float]:
    """Everything in the documentation's order; seconds by script."""
    with served(Hub(releases())) as hub:
        follower = Follower(folder, hub)
        download = [sys.executable, ROOT / "recipes/searchr1/download.py"]
        follower.run("download", [*download, "--save_path", folder / "wiki2018"])
        follower.run("download of questions", [*download, "rlinf-data", "--save_path", folder])
        found = '. recipes/common.sh; rlflow_setup run; echo "$RLFLOW_PYTHON"'
        python = follower.run("python", ["bash", "-c", found]).strip()
        encoder = folder / "encoder"
        follower.run("encoder", [python, "-c", ENCODER, encoder])
        for repo, place in {
            "intfloat/e5-base-v2": encoder,
            "Qwen/Qwen2.5-3B-Instruct": POLICY,
        }.items():
            hub.files[repo] = {file.name: file.read_bytes() for file in place.iterdir()}
        follower.script("build_index")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = serve(follower, port)
        try:
            train_and_evaluate(follower, python, f"127.0.0.1:{port}")
        finally:
            end(server)
        return follower.seconds


def train_and_evaluate(follower: Follower, python: str, server: str) -> None:
    folder, questions = follower.folder, str(follower.folder / "train.jsonl")
    places = {
        "/path/to/data/searchr1_train.jsonl": questions,
        "/path/to/model/Qwen2.5-3B-Instruct": "Qwen/Qwen2.5-3B-Instruct",
        "0.0.0.0:8000": server,
    }
    theirs = filled("rlinf_train.yaml", folder / "theirs.yaml", places)
    run, ours, exported = folder / "run", folder / "ours.yaml", folder / "exported"
    words = ["--config", theirs, "--out", ours, f"run.directory={run}", *CPU, *SMALL]
    told = follower.script("run_train", *words)
    assert f"train --config {ours}" in told and "not known: 0" in told
    follower.script("run_train", "--config", ours)
    assert (run / "metrics.jsonl").stat().st_size
    convert = [python, "tools/ckpt_convert", "to-hf", run / "checkpoints" / "step_000001", exported]
    follower.run("convert", [*convert, "--hf", POLICY])
    places = {
        "/path/to/eval/model": str(exported),
        "/path/to/eval.jsonl": questions,
        "0.0.0.0:8000": server,
    }
    theirs = filled("rlinf_eval.yaml", folder / "their_eval.yaml", places)
    ours = folder / "our_eval.yaml"
    follower.script("run_train", "--config", theirs, "--out", ours, *CPU)
    words = ["--config", ours, "--model", exported, "--questions", "4", "--out", folder / "eval"]
    evaluated = follower.script("run_eval", *words)
    summary = json.loads((folder / "eval" / "summary.json").read_text())
    assert evaluated.startswith("EM ") and summary["eval/searches"] > 0, (evaluated, summary)


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    place.mkdir(parents=True, exist_ok=True)
    print(json.dumps({name: round(seconds, 1) for name, seconds in follow(place).items()}))
