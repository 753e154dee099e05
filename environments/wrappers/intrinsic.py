"""Intrinsic rewards from a language model that labels what the agent was shown, while training goes
on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.components import check_options
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step
from rlflow.values import Component, NonNegativeFloat, PositiveFloat, PositiveInt
from rlflow_environments.common.chat_endpoint import ChatEndpoint
from rlflow_environments.common.text import well_formed
from rlflow_environments.wrappers.annotator import Annotator
from rlflow_environments.wrappers.reward_models import REWARD_MODEL, RewardModel
from rlflow_environments.wrappers.wrapper import Base, Seen, Wrapper

LONGEST_CAPTION = 500  # characters
MAX_REPLY_TOKENS = 512


class IntrinsicRewards(Wrapper):
    """reward = extrinsic * base reward + intrinsic * r(caption) / N(caption)^beta    (ONI, arXiv
    2410.23022)

    The caption is what the base's observation says; N counts it within the episode, this time
    included. r is a reward model's, which learns from labels of a language model: see
    `reward_models`. Both terms are named rewards, `extrinsic` and `intrinsic`, without their
    coefficients.

    The reward is what the model says at the moment of the step, and labels arrive later: it is not
    stationary, and nothing that was rewarded is revised. (The paper asks the model when the learner
    consumes the step, which in a synchronous run is at most one collection later.) No step waits
    for a label; with an endpoint that is dead the intrinsic term of unknown captions stays 0.
    """

    metrics = {
        "intrinsic_return": Metric(
            "reward",
            "sum of the episode's intrinsic rewards, without their coefficient",
            chart=True,
        ),
        "intrinsic/labels": Metric("count", "that the annotator has", "sum"),
        "intrinsic/waiting": Metric("count", "questions that were not asked yet", "sum"),
        "intrinsic/failed": Metric(
            "count", "questions that the endpoint failed to answer since the last step", "sum"
        ),
        "intrinsic/dropped": Metric(
            "count", "questions that were too old to be asked since the last step", "sum"
        ),
    }

    def __init__(
        self,
        base: Base,
        goal: str,
        *,
        endpoint: Mapping[str, Any],
        model: Component | None = None,
        extrinsic: float = 1.0,
        intrinsic: float = 0.4,
        beta: NonNegativeFloat = 3.0,
        lines: PositiveInt | None = None,
        batch: PositiveInt = 100,
        most_waiting: PositiveInt = 10_000,
        most_labels: PositiveInt = 25_000,
        retry_s: PositiveFloat = 10.0,
        state: str | Path | None = None,
    ) -> None:
        """goal: in words, for the language model. endpoint: url, model and further options of
        `make_endpoint`. model: retrieval (None), classifier or ranking, with options. lines: how
        many lines of an observation are the caption (None: all). batch, most_waiting, most_labels,
        retry_s: see Annotator. state: a file that keeps labels and model, also from one run to the
        next. Raises ConfigError, DataError, MissingPackageError.
        """
        super().__init__(base)
        self._model: RewardModel = REWARD_MODEL.build(model or "retrieval", "environment.model")
        options = check_options(endpoint, make_endpoint, where="environment.endpoint")
        self._annotator = Annotator(
            make_endpoint(**options),
            self._model,
            goal,
            batch=batch,
            most_waiting=most_waiting,
            most_labels=most_labels,
            retry_s=retry_s,
            path=None if state is None else Path(state).expanduser(),
        )
        self._extrinsic = extrinsic
        self._intrinsic = intrinsic
        self._beta = beta
        self._lines = lines
        self._told = {"failed": 0, "dropped": 0}

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step with the intrinsic reward of its observation; none where it says
        nothing."""
        caption = self.caption(seen.observations[-1])
        value = 0.0
        if caption:
            counts: dict[str, int] = seen.own.setdefault("counts", {})
            counts[caption] = counts.get(caption, 0) + 1
            value = self._model.reward(caption) * float(counts[caption]) ** -self._beta
            self._annotator.offer(self._model.questions(caption))
        seen.own["return"] = seen.own.get("return", 0.0) + value
        return dataclasses.replace(
            step,
            reward=self._extrinsic * step.reward + self._intrinsic * value,
            rewards={
                **step.rewards,
                "extrinsic": float(step.reward),
                "intrinsic": value,
            },
            metrics={**step.metrics, "intrinsic_return": seen.own["return"]},
        )

    def caption(self, observation: str) -> str:
        """What an observation says, as the annotator reads it."""
        lines = observation.strip()[: LONGEST_CAPTION * 10].splitlines()[: self._lines]
        return well_formed("\n".join(line.strip() for line in lines)[:LONGEST_CAPTION])

    def report(self) -> dict[str, float]:
        """The base's numbers and the annotator's."""
        counts = {"failed": self._annotator.failed, "dropped": self._annotator.dropped}
        since = {
            f"intrinsic/{name}": float(count - self._told[name]) for name, count in counts.items()
        }
        self._told = counts
        now = {
            "intrinsic/labels": float(self._annotator.labelled),
            "intrinsic/waiting": float(self._annotator.waiting),
        }
        return {**super().report(), **now, **since}

    def shutdown(self) -> None:
        """Ends the annotator, which keeps its state, and the base."""
        self._annotator.close()
        super().shutdown()


def make_endpoint(
    *,
    url: str,
    model: str,
    api_key_variable: str = "OPENAI_API_KEY",
    timeout_s: PositiveFloat = 60.0,
    tries: PositiveInt = 1,
    concurrency: PositiveInt = 8,
    temperature: NonNegativeFloat = 0.1,
) -> ChatEndpoint:
    """The annotator's model. url: of the API, such as http://localhost:8000/v1. api_key_variable:
    the environment variable with the key. timeout_s: of a request. tries: requests before a
    question waits again. temperature: the paper's. Raises ConfigError, MissingPackageError."""
    return ChatEndpoint(
        url,
        model,
        api_key=os.environ.get(api_key_variable),
        concurrency=concurrency,
        timeout_s=timeout_s,
        tries=tries,
        temperature=temperature,
        max_tokens=MAX_REPLY_TOKENS,
        name_of="environment.endpoint.{}".format,
    )


WRAPPER = IntrinsicRewards
