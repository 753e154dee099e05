"""Labels from a language model that arrive later: whoever offers a question goes on at once."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import torch

from rlflow.errors import DataError
from rlflow.storage.daemon import start_daemon
from rlflow.storage.files import replacing
from rlflow_environments.common.chat_endpoint import ChatEndpoint
from rlflow_environments.wrappers.reward_models import Question, RewardModel

logger = logging.getLogger(__name__)

SAVE_S = 30.0  # between two savings
END_S = 10.0  # for the thread to end
ALONE_S = 5.0  # for others to write the same file


class Annotator:
    """A thread that asks an endpoint about the newest questions first, `batch` at a time, each
    question once, and lets a reward model learn from the labels. Of more than `most_waiting`
    questions the oldest are dropped; at `most_labels` labels nothing more is asked.

    An endpoint that fails is told of once and counted; its questions wait, and it is asked again
    after `retry_s`. Nobody waits for it. Source: ONI, arXiv 2410.23022.
    """

    def __init__(
        self,
        endpoint: ChatEndpoint,
        model: RewardModel,
        goal: str,
        *,
        batch: int = 100,
        most_waiting: int = 10_000,
        most_labels: int = 25_000,
        retry_s: float = 10.0,
        path: Path | None = None,
    ) -> None:
        """path: of the file in which labels and model are kept, at most every SAVE_S seconds and at
        the end; what it holds is taken over. Raises DataError where it holds something else."""
        self._endpoint, self._model, self._goal = endpoint, model, goal
        self._batch = batch
        self._most_waiting = most_waiting
        self._most_labels = most_labels
        self._retry_s = retry_s
        self._path = path
        self._labels: dict[Question, float] = {}
        self._waiting: OrderedDict[Question, None] = OrderedDict()
        self._asked: dict[Question, Future[float]] = {}  # and not answered yet
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._failing = False
        self._saved_at = 0.0
        self.failed = self.dropped = 0
        if path is not None and path.is_file():
            self._load(path)

    def offer(self, questions: Iterable[Question]) -> None:
        """Takes questions that have no label yet and do not wait for one."""
        with self._changed:
            for question in questions:
                if any(question in known for known in (self._labels, self._waiting, self._asked)):
                    continue
                if self._closed or len(self._labels) >= self._most_labels:
                    break
                if len(self._waiting) >= self._most_waiting:
                    self._waiting.popitem(last=False)
                    self.dropped += 1
                self._waiting[question] = None
                self._changed.notify()
            if self._waiting and self._thread is None and not self._closed:
                self._thread = start_daemon("annotator", self._work)

    @property
    def waiting(self) -> int:
        """Questions that were not asked yet."""
        return len(self._waiting)

    @property
    def labelled(self) -> int:
        """Questions that have a label."""
        return len(self._labels)

    def close(self) -> None:
        """Ends the thread, which saves once more; what waits is dropped. Takes at most END_S
        seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._endpoint.close()
        if self._thread is not None:
            self._thread.join(END_S)

    def _work(self) -> None:
        while batch := self._take():
            labels, problems = _answers(batch)
            with self._changed:
                self._asked = {}
                self._labels |= labels
                failed = [question for question in batch if question not in labels]
                for question in failed[: self._most_waiting - len(self._waiting)]:
                    self._waiting[question] = None
                    self._waiting.move_to_end(question, last=False)
            if labels:
                self._model.learn(self._labels)
                self._save_if(time.monotonic() - self._saved_at > SAVE_S)
            if problems and not self._closed:
                self._tell(problems, none=not labels)
            self._failing = not labels
        self._save_if(bool(self._labels))

    def _take(self) -> dict[Question, Future[float]]:
        """The newest questions, once there are some, and answers to come; none when it is over."""
        with self._changed:
            if self._failing:
                self._changed.wait_for(lambda: self._closed, self._retry_s)
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            if self._closed:
                return {}
            model, newest = self._model, [*reversed(self._waiting)][: self._batch]
            for question in newest:
                del self._waiting[question]
                # Not without the lock: of an endpoint that was closed no answer comes
                self._asked[question] = self._endpoint.submit(
                    model.ask(self._goal, question), model.read
                )
            return self._asked

    def _tell(self, problems: list[BaseException], *, none: bool) -> None:
        self.failed += len(problems)
        if none and not self._failing:
            told = "the annotator gives no labels; captions without one are rewarded 0 for now: %s"
            logger.warning(told, problems[0])

    def _save_if(self, wanted: bool) -> None:
        if self._path is None or not wanted:
            return
        self._saved_at = time.monotonic()
        try:
            with _alone(self._path):  # rollout workers have annotators of their own
                known = self._read(self._path)[0] if self._path.is_file() else {}
                with self._changed:
                    self._labels = {**known, **self._labels}
                labels = [[list(question), label] for question, label in self._labels.items()]
                state = {"labels": labels, "model": self._model.state_dict(), **self._identity()}
                with replacing(self._path) as aside:
                    torch.save(state, aside)
        except (OSError, DataError) as problem:
            logger.warning("the annotator's state cannot be kept: %s: %s", self._path, problem)

    def _load(self, path: Path) -> None:
        self._labels, model = self._read(path)
        self._model.load_state_dict(model)
        self._model.learn(self._labels)

    def _read(self, path: Path) -> tuple[dict[Question, float], dict[str, Any]]:
        """Labels and the model's state of a file. Raises DataError."""
        try:
            state = torch.load(path, weights_only=True)
            told = {key: state[key] for key in self._identity()}
            labels = {tuple(question): float(label) for question, label in state["labels"]}
            model = state["model"]
        except (
            OSError,
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,
            EOFError,
            pickle.UnpicklingError,
        ) as problem:
            raise DataError(
                f"{path}: expected the state of an annotator, found {type(problem).__name__}. "
                "Remove it, or name another file."
            ) from None
        if told != self._identity():
            raise DataError(
                f"{path}: expected labels for {self._identity()}, found those for {told}. Name "
                "another file for this goal."
            )
        return labels, model

    def _identity(self) -> dict[str, Any]:
        return {"goal": self._goal, "kind": type(self._model).__name__}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Inside, no other process of this machine writes to the file's folder; after ALONE_S seconds
    one goes in all the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder, end = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + ALONE_S
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(folder)


def _answers(
    asked: Mapping[Question, Future[float]],
) -> tuple[dict[Question, float], list[BaseException]]:
    """The labels, and why there are no others. The endpoint's own time limits and attempts bound
    the wait."""
    labels, problems = {}, []
    for question, future in asked.items():
        try:
            problem = future.exception()
        except CancelledError as ended:
            problem = ended
        if problem is None:
            labels[question] = float(future.result())
        else:
            problems.append(problem)
    return labels, problems
