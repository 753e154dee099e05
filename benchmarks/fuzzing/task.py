"""The smallest training run: a random model of a dozen words, and an environment that wants one of them; also gone mad."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.types import Episode, Step, Task

WORDS = ("<pad>", "<end>", *"abcdef", "?", "|")


class Letters(Environment):
    """Shows `X?` and wants X, twice."""

    stop = tuple("abcdef?|")

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{letter}", f"{letter}?", letter) for letter in "abcdef"]

    async def step(self, episode: Episode, response: str) -> Step:
        return Step(
            "|a?", float(response == episode.task.answer), episode.turns == 2, {"said": 1.0}
        )


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Mad(Letters):
    """Letters, with a chance of something else at every call. hang_s: of a call that would not end by itself."""

    def __init__(
        self, seed: int = 0, share: float = 0.1, hang_s: float = 8.0, where: str = "step"
    ) -> None:
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._share, self._hang_s, self._where = share, hang_s, where
        self._fault("__init__")

    def tasks(self, split: str) -> Any:
        self._fault("tasks")
        tasks = list(super().tasks(split))
        if not self._strikes("tasks_result"):
            return tasks
        odd = [None, 7, [], [None], "abc", {}, tasks * 2, [Task("a", "", "a")], [Task("a", "a?" * 3000, "a")],
        [Task("\ud83d", "a?", "a")],
               [Task("a", "\ud83d?", "a"), *tasks], [Task("a", None, None), *tasks], [Task(7, "a?", 7)],
               iter(tasks)]  # fmt: skip
        return self._draw.choice(odd)

    def reset(self, task: Task) -> Any:  # plain: it runs in a thread
        self._fault("reset")
        return (
            self._draw.choice([None, task, 7, Step()])
            if self._strikes("reset_result")
            else Episode(task)
        )

    async def step(self, episode: Episode, response: str) -> Any:
        if self._strikes("step_wait"):
            await asyncio.sleep(self._draw.choice([0.01, 0.3, 3600.0]))
        self._fault("step", most_s=0.5)  # it blocks the event loop
        step = await super().step(episode, response)
        return self._odd_step(step) if self._strikes("step_result") else step

    def close(self, episode: Episode) -> None:  # type: ignore[override]
        self._fault("close")

    def report(self) -> Any:
        self._fault("report", most_s=0.5)
        return (
            self._draw.choice([None, {"a": "b"}, {"a/b": float("nan")}, [1], {7: 1}])
            if self._strikes("report_result")
            else {}
        )

    def shutdown(self) -> None:
        self._fault("shutdown", most_s=0.5)

    def _odd_step(self, step: Step) -> Any:
        draw = self._draw
        odd: dict[str, list[Any]] = {
            "observation": [
                "\ud83d",
                "",
                "\x00",
                "<end>",
                "a" * 20_000,
                [{"role": "user", "content": "a"}],
                None,
                7,
                b"a",
                "\udfff" * 50,
            ],
            "reward": [
                float("nan"),
                float("inf"),
                -1e300,
                1e18,
                "1",
                None,
                10**400,
                True,
                1j,
                [1.0],
            ],
            "terminated": ["no", None, 1],
            "metrics": [
                {"x": "y"},
                {"x": float("nan")},
                {7: 1.0},
                None,
                {"\ud83d": 1.0},
                {"x": 1e308},
                {"x": [1]},
            ],
            "replace": [{-1: "a"}, {0: "b"}, {7: "a"}, {0: 7}, [1], {0: "\ud83d"}, {True: "a"}],
            "stop": [("",), (), "abc", (7,), None, ("\ud83d",), ("a" * 1000,)],
        }
        if draw.random() < 0.15:
            return draw.choice([None, 7, "Step", (1, 2), Step, {"reward": 1}])
        key = draw.choice(list(odd))
        setattr(step, key, draw.choice(odd[key]))
        return step

    def _strikes(self, where: str) -> bool:
        with self._lock:
            return where.startswith(self._where) and self._draw.random() < self._share

    def _fault(self, where: str, most_s: float | None = None) -> None:
        if not self._strikes(where):
            return
        most_s = self._hang_s if most_s is None else most_s
        errors: list[Any] = [
            ValueError("a fault"), StopIteration(), StopAsyncIteration(), SystemExit(3), SystemExit("why"),
            KeyboardInterrupt(), GeneratorExit(),
            asyncio.CancelledError(), MemoryError(), RecursionError(), OSError(28, "No space left on device"),
            TimeoutError(), _Unspeakable(),
            ValueError("half \ud83d"), ValueError("line\nline\x1b[31m"), ExceptionGroup("several", [ValueError("a")]),
            BaseException("base"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), EOFError(), ConnectionResetError(), BrokenPipeError(),
            AssertionError(),
        ]  # fmt: skip
        found = self._draw.choice([*errors, 0.01, 0.2, most_s, most_s])
        if isinstance(found, BaseException):
            raise found
        time.sleep(min(found, most_s))


def write_model(path: Path) -> Path:
    """A HuggingFace directory with a random Qwen2 in two files; returns it."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=len(WORDS), eos_token_id=1, pad_token_id=0, tie_word_embeddings=False, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(path, max_shard_size="50KB")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=WORDS[0], eos_token=WORDS[1]
    ).save_pretrained(str(path))
    return path


def settings(model: Path, runs: Path, environment: str = "Letters") -> dict[str, Any]:
    """The configuration of a run of a second: nested, for a YAML file."""
    return {
        "run": {"directory": f"{runs}/{{name}}", "name": "fuzz", "steps": 2, "max_minutes": 0.5},
        "model": {"path": str(model)},
        "environment": {"name": f"{Path(__file__).resolve()}:{environment}"},
        "rollout": {
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "max_turns": 2,
            "max_response_tokens": 2,
            "max_total_tokens": 16,
            "faults": {"max_aborted_share": 0.25, "call_s": 1.0, "episode_s": 4.0},
        },
        "trainer": {"lr": 0.005},
        "evaluation": {"every_steps": 1, "at_start": False},
        "checkpoint": {"every_steps": 1},
        "metrics": {"progress": "none", "picture": False},
    }
