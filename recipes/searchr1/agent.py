"""An agent on OpenAI's client that plays the demo: it asks the policy, searches, and asks again.

Train it as docs/train_your_agent.md says. CORPUS names the passages that it searches."""

import functools
import os
from typing import Any

from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.indices import Retriever, make_retriever
from rlflow_environments.search.protocols.text import (
    INVALID_ACTION,
    format_observation,
    parse_action,
)
from rlflow_environments.search.rewards.scoring import searchr1_em


@functools.cache
def retriever() -> Retriever:
    return make_retriever({"name": "dense"}, Corpus(os.environ["CORPUS"]))


async def agent(task: dict[str, Any], client: Any) -> None:
    messages = [{"role": "user", "content": task["prompt"]}]
    asked = {"model": "policy", "messages": messages, "stop": ["</search>", "</answer>"]}
    while True:
        reply = await client.chat.completions.create(
            **asked, extra_body={"include_stop_str_in_output": True}
        )
        said = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        action = parse_action(said)
        if action is not None and action.kind == "answer":
            return
        found = INVALID_ACTION
        if action is not None:
            found = format_observation(retriever().search([action.content], 3)[0])
        messages.append({"role": "user", "content": found})


def reward(task: dict[str, Any], played: dict[str, Any]) -> float:
    said = [one["content"] for one in played["messages"] if one["role"] == "assistant"]
    answered = parse_action(said[-1]) is not None and "</answer>" in said[-1]
    return searchr1_em("".join(said), task["solutions"]) if answered else 0.0
